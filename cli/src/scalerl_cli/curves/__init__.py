"""``scalerl fit``, ``plan`` and ``report``: their arguments, and what they print and write; the analysis is that of ``scalerl_analysis``."""
