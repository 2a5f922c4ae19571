"""A local web page to segment photographs and name regions."""
