"""Large products outside of the recurrence, and how what they make lies in memory."""
