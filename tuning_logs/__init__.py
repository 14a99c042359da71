"""The tuning logs that ship with ecornn: JSON lines, one trial a line (docs/TUNING_LOG_FORMAT.md)."""
