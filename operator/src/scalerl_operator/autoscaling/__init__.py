"""The autoscaler around its policies: what they are asked with, and what becomes of their answer.

Lives here: the observation of a run (:mod:`.observation`) and of how busy it is (:mod:`.load`), the
question to the forecast (:mod:`.question`), finished runs as its prior (:mod:`.earlier`) and the asking (:mod:`.sidecar`, by :mod:`.client`), the record
(:mod:`.record`) and where it is kept (:mod:`.storage`), its replay (:mod:`.replay`), and the step that joins them
(:mod:`.controller`).

Never lives here: a rule of when to stop or to grow (:mod:`scalerl_operator.policy`), a curve, or
anything that carries an action out: the wanted action is handed back as data.
"""
