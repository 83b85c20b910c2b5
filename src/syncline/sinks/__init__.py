"""Where metrics go besides the run's folder: TensorBoard files, MLflow.

`sink` says what a sink is, `tensorboard` and `mlflow` are two, `choosing` finds those that a job has, and `thread`
runs them beside a coordinator: nothing of the job waits for a sink.
"""
