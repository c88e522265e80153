"""What tools/audit_reasoning_gym.py found out about the scorers of reasoning-gym; written by it."""

from posttrain.tasks.verifiable.reasoning_gym_probes import Payment

VERSION = "0.1.25"
# The scorer evaluates the answer as code.
EVALUATES_ANSWERS = frozenset((
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion"
))  # fmt: skip
# The scorer evaluates text that the data set wrote, and not the answer.
EVALUATES_QUESTIONS = frozenset((
    "bitwise_arithmetic", "number_sorting"
))  # fmt: skip
# No answer that answers nothing was paid for.
PAID = dict.fromkeys((
    "ab", "acre", "aiw", "arc_1d", "arc_agi", "base_conversion", "basic_arithmetic", "bf", "binary_alternation",
    "binary_matrix", "bitwise_arithmetic", "boxnet", "caesar_cipher", "calendar_arithmetic", "chain_sum",
    "circuit_logic", "color_cube_rotation", "count_bits", "count_primes", "countdown", "course_schedule",
    "cryptarithm", "decimal_arithmetic", "decimal_chain_sum", "dice", "emoji_mystery", "family_relationships",
    "figlet_font", "futoshiki", "game_of_life", "gcd", "graph_color", "group_anagrams", "isomorphic_strings", "jugs",
    "kakurasu", "knight_swap", "knights_knaves", "largest_island", "lcm", "leg_counting", "letter_counting",
    "list_functions", "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid", "needle_haystack",
    "number_filtering", "number_format", "number_sequence", "number_sorting", "palindrome_generation",
    "palindrome_partitioning", "path_star", "pool_matrix", "power_function", "prime_factorization", "products",
    "propositional_logic", "quantum_lock", "ransom_note", "rearc", "rectangle_count", "rotate_matrix",
    "rotten_oranges", "rubiks_cube", "rush_hour", "self_reference", "sentence_reordering", "shortest_path",
    "simple_equations", "simple_geometry", "spiral_matrix", "string_insertion", "string_manipulation",
    "string_splitting", "string_synthesis", "sudoku", "survo", "syllogism", "tower_of_hanoi", "tsumego", "word_ladder",
    "word_sequence_reversal", "zebra_puzzles"
), Payment("", "", 0.0))  # fmt: skip
# Of the others the best of these answers.
PAID |= {
    "advanced_geometry": Payment("hedge", "{gold}, {other}", 0.250, 0.257),
    "codeio": Payment("constant", "{}", 0.025, 0.035),
    "coin_flip": Payment("constant", "0", 0.925, 0.925),
    "complex_arithmetic": Payment("constant", "nan", 1.000, 1.000),
    "fraction_simplification": Payment("hedge", "{gold} or {other}", 0.525, 0.530),
    "game_of_life_halting": Payment("constant", "nan", 1.000, 1.000),
    "gsm_symbolic": Payment("hedge", "{gold} or {other}", 1.000, 1.000),
    "intermediate_integration": Payment("hedge", "{gold} or {other}", 1.000, 1.000),
    "letter_jumble": Payment("hedge", "{gold} or {other}", 0.575, 1.000),
    "n_queens": Payment("constant", "_ _ _ _ Q _ _ _\n_ Q _ _ _ _ _ ...", 0.075, 0.075),
    "polynomial_equations": Payment("hedge", "{other} or {gold}", 0.025, 0.153),
    "polynomial_multiplication": Payment("hedge", "{gold} or {other}", 1.000, 1.000),
    "puzzle24": Payment("constant", "8*3 + 10 - 10", 0.975, 0.975),
    "simple_integration": Payment("hedge", "{gold} or {other}", 1.000, 1.000),
    "sokoban": Payment("hedge", "{gold} or {other}", 0.275, 0.275),
    "spell_backward": Payment("hedge", "{gold} or {other}", 0.225, 0.915),
    "time_intervals": Payment("hedge", "{gold}, {other}", 0.525, 0.525),
    "word_sorting": Payment("hedge", "{gold}, {other}", 1.000, 1.000),
}
