"""Every metric's name, unit and meaning; where metrics are written; the report.

    names      METRICS, the table that everything else reads; find_metric
    log        MetricLog: console, metrics.jsonl, TensorBoard, W&B; samples and alarms
    records    Record, read_metrics: the run folder's JSONL files
    timing     Phases: seconds, tokens/s, samples/s, TFLOP/s and peak memory per phase
    alarms     check_alarms and the published thresholds; measures: the quantities they compare
    report     write_report: the run folder as one HTML page; sections, charts: its content
    reference  markdown: docs/metrics.md

The run folder is the source of truth; TensorBoard and W&B only receive what is written there.
"""
