"""Programs that measure speed, accuracy and robustness. Run them from a checkout."""
