"""What is run and set beside its plan: `check`, `fit`, `calibrate`, and the proof of a training run."""
