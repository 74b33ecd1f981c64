"""``hybridflow doctor``: what a machine or an allocation has, what of it will be used, and what is in the way."""
