"""The exercises: what to write, the library's own function, and mistakes that a check knows by name.

The stub is the file to begin with: its docstring is the task. Its function is called as the exercise and takes the
arguments of a case. Tensors are float64, masks bool. Shapes: B rows, T tokens, N prompts, G samples, P pairs.
"""

from __future__ import annotations

from posttrain.commands.exercises import answers, policy_gradients

EXERCISES = {
    "response_mask": answers.RESPONSE_MASK,
    "bradley_terry": answers.BRADLEY_TERRY,
    "policy_gradient_loss": policy_gradients.POLICY_GRADIENT_LOSS,
    "group_advantage": policy_gradients.GROUP_ADVANTAGE,
    "gae": policy_gradients.GAE,
    "clipped_surrogate": policy_gradients.CLIPPED_SURROGATE,
    "tagged_answer": answers.TAGGED_ANSWER,
    "token_tis": policy_gradients.TOKEN_TIS,
    "dpo": answers.DPO,
    "best_of_n": answers.BEST_OF_N,
    "kl_estimators": policy_gradients.KL_ESTIMATORS,
    "pass_at_k": answers.PASS_AT_K,
}
