"""On-policy distillation (arXiv 2306.13649): the actor learns a teacher's distribution on its own responses."""

from hybridflow.flows import nodes

STEP = nodes.SAMPLE >> nodes.TEACHER_TOP >> nodes.DISTILL
