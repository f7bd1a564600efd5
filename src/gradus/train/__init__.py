"""The trainer: one exact step, run state that resumes to the bit, the log."""
