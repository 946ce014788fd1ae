"""The second packaged task, 9x9 Sudoku by reasoning-gym (generator and grader theirs), and the model trained on it.

puzzle     a puzzle as prompt and response, its grader, the held-out puzzles
tokenizer  digits, blanks and line breaks as tokens
data       reasoning-gym's puzzles, their symmetries, batches with masks
initialisation  first weights: heads that look along columns
train      the command that trains `tiny-sudoku`
evaluate   the command that scores it; `--write-puzzles` makes the file of held-out puzzles
"""
