"""The field's benchmarks through lm-eval (`pip install asrd[eval]`); lm-eval itself is imported by `model` only.

model          `AsrdLM`, the model `asrd` of lm-eval: generation by the engine, likelihood by LLaDA's estimate
likelihood     that estimate
generations    answers on disk as they come, from which a run resumes
stopping       where a text ends for a benchmark
watch          seconds, anchors and flip-flops of each text
tasks          the benchmarks by name, and the score that counts for each
data           their files on disk in the place of the Hub
packaged_task  the problems of `tiny` as a task
summaries      ROUGE and BERTScore
code_metric    pass@k of programs, in the place of the Hub's metric
sandbox        where programs run; sandbox_child is its inner side
run            one cell of a table: generated, scored, on disk
replay         proof of the scoring: published solutions in the place of a model
session        all cells of an evaluation, with its record
record         versions, weights, data, machine
summary        scores, intervals, differences, speed
report         tables
presets        the paper's tables as evaluations
paper          the paper's figures (paper.csv)
comparison     ours beside them
annotation     texts for an annotator of errors
repeat         an evaluation run again and compared token by token
"""
