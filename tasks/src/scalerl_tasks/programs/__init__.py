"""The verifier of programs: ``suites`` reads the tests of a prompt, ``verifier`` runs them in the sandbox and makes the verdict."""
