"""The operator with a thousand runs: how soon they are reconciled, and what they cost when nothing happens.

See :mod:`support.operator_measurements` for what is measured and how.

    python benchmarks/operator_load.py [--quick] [--runs N] [--idle SECONDS] [--parts [idle] [edits] [suspend]]
"""

from support.operator_measurements import main

if __name__ == "__main__":
    main()
