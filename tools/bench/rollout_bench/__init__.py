"""Measuring rollout: what is asked of the engines, what bounds them, their processes, and the report."""
