"""Schedules of one launch a step and phase, and what they share."""
