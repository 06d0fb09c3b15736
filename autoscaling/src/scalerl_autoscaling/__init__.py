"""Decides from a run's reward curve whether to stop it, scale or balance its generators, and records each decision.

::

    autoscaler.Autoscaler.report ─ one step in the background
      ├─ observation.observe, balance.LoadMeter     the run's status as data
      ├─ forecast_request.build_request             from the points and the spec, with earlier_runs.select as a prior
      ├─ forecast_client.Sidecar ─▶ curve-fit sidecar
      ├─ decide.decide (alarm, vote, throughput) or balance.balance     pure: the same input, the same decision
      ├─ decision_log.DecisionRecord.append ─▶ coordinator              before the decision is executed
      └─ report.report_of                           from the decision log

Lives here: the above, and the replay of recorded decisions (:mod:`.replay`). Never lives here: a curve fit, or the execution of a
decision.
"""
