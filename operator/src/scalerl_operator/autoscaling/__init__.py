"""Decides from a run's reward curve whether to stop it, grow it or balance its generators, and records each decision.

Lives here: the observation of a run (:mod:`.observation`) and of how busy it is (:mod:`.utilisation`), the question to the
forecast (:mod:`.question`), finished runs as its prior (:mod:`.history`), the request (:mod:`.forecast_request`,
:mod:`.forecast_client`), the rules (:mod:`.decide`, :mod:`.vote`, :mod:`.alarm`, :mod:`.balance`, all pure), the decision log
(:mod:`.decision_log`), its replay (:mod:`.replay`), and the step that joins them (:mod:`.autoscaler`).

Never lives here: a curve fit, or anything that carries an action out: the wanted action is returned as data.
"""
