"""Tests of the operator.

A package of its own name, because pytest names a loose test file after its path, and a package called
``operator`` would take the place of the standard library's.
"""
