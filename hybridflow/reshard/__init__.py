"""How weights regroup: what a layout cuts (spec), who sends what to whom (plan), and doing it (execute, transport)."""
