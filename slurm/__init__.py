"""Batch scripts, to copy and edit; a package so that ``hybridflow launch`` finds them where it is installed."""
