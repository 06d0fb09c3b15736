"""Tests of scalerl_local."""
