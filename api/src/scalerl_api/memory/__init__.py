"""Estimates of the memory of a run, from the spec and the model's size::

    ModelSize ──▶ trainer_rank: one rank in a step, by its engine (scalerl_api.engines)
             └──▶ roles: copies on the host, generators ──▶ limits: refuses what does not fit
                                                        └──▶ containers: requests of pods

They serve to reject runs that cannot fit, not to use the last byte. Warnings, errors and requests use the same figures.
"""
