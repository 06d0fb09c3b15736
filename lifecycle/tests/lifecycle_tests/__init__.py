"""Tests of scalerl_lifecycle."""
