"""Every metric's name, unit and meaning; where they are written; the report.

    names      METRICS, find_metric: what may be logged
    log        MetricLog: console, metrics.jsonl, TensorBoard, W&B; samples and alarms
    records    Record, read_metrics: the run folder's line files
    timing     Phases: seconds, tokens/s, samples/s, TFLOP/s and peak memory per phase
    alarms     check_alarms; rules: the published thresholds and what to change
    report     write_report: the run folder as one HTML page
    reference  markdown: docs/metrics.md

The run folder is the truth; TensorBoard and W&B only receive what is written there.
"""
