"""A page in the browser where photographs can be segmented and regions named; it runs on this machine only."""
