"""Metrics: workers append to a bounded spool and wait for nobody; a forwarder beside the supervisor writes MLflow.

recorder -> metrics/rank<k>.jsonl -> spool -> forwarder -> mlflow_writer -> MLflow -> mlflow_reader
"""
