"""The operator with a thousand runs: how soon they are reconciled, and what they cost when nothing happens.

See :mod:`support.operator_load` for what is measured and how.

    python benchmarks/operator.py [--quick] [--runs N] [--idle SECONDS] [--parts [idle] [edits] [suspend]]

This file has the name of a module of the standard library, and the folder of a script comes first where Python looks
for modules: so ``import operator`` in any script of this folder may find this file. Then it steps aside.
"""

import sys

if __name__ == "__main__":
    from support.operator_load import main

    main()
else:
    from importlib.machinery import PathFinder

    _here = __file__.rpartition("/")[0]
    _found = PathFinder.find_spec(__name__, [path for path in sys.path if path not in ("", _here)])
    if _found is None or _found.loader is None:
        raise ImportError(f"no module {__name__} but {__file__}", name=__name__)
    # Whoever imports gets what stands here once this file is through, and not this file.
    _module = sys.modules[__name__] = type(sys)(__name__)
    _module.__spec__, _module.__file__ = _found, _found.origin
    _found.loader.exec_module(_module)
