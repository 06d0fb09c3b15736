"""Tests of scalerl_autoscaling."""
