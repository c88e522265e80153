"""What tools/audit_reasoning_gym.py found out about the scorers of reasoning-gym; written by it."""

from posttrain.tasks.reasoning_gym_probes import Payment

VERSION = "0.1.25"
EVALUATES_ANSWERS = frozenset(("binary_matrix", "countdown"))
EVALUATES_QUESTIONS = frozenset(("bitwise_arithmetic", "number_sorting"))
PAID = {"chain_sum": Payment("", "", 0.0)}
