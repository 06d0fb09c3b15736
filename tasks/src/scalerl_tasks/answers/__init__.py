r"""Answers: what they are in a completion, and whether one equals the reference.

How an answer goes through the package::

    completion ─▶ extraction.extract() ─▶ text, and whether a box or tag held it

    exact         text == reference                                            verifiers.ExactVerifier
    number        quantity.read_quantity() of a box, .last_quantity() of prose
                    └▶ same_quantity(): exact rationals                        verifiers.NumberVerifier
    math-verify   prose.find_in_prose() without a box ─▶ the answer's text     verifiers.MathVerifier
                  reader.read_answer()
                    normalization.normalize() ─▶ one form of LaTeX; spellings has what becomes what
                    structure.Structure.read() ─▶ nodes: values, lists, sets, intervals, equations, matrices, words
                  equivalence.equivalent(): some reading of the reply is some reading of the reference
                    node_equality.equal()       structures, equations and inequalities
                    real_sets.same_real_sets()  intervals, unions, solutions of inequalities
                    expression_equality.same()  two expressions: sympy's order, then values to 32 digits
                      expression_reader.read_expression(): LaTeX ─▶ sympy, by its grammar
                      library_reader.read_by_library(): what that grammar lacks, by math-verify's reader

No text is evaluated as Python. ``exact`` and ``number`` need no sympy.
"""
