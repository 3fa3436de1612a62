"""The files of a deployment, and the variables that they and the code name."""

from __future__ import annotations

import re
from functools import lru_cache

from dev.paths import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
CHART = DEPLOY / "helm" / "highwater"
# Variables of others, by what they begin with, and those of no family.
OTHERS = ("AWS_", "DAGSTER_", "SPARK_", "PYSPARK_", "POSTGRES_", "PG", "JAVA_HOME", "CODE_SERVER_HOST")
# Values and SQL that look like variables, and a variable that Spark's launcher alone reads.
NO_VARIABLES = {"SASL_SSL", "SASL_PLAINTEXT", "HADOOP_CONF_DIR"}


def find_variables(text: str) -> set[str]:
    """The names in a text that look like those of environment variables."""
    return set(re.findall(r"(?<![\w/.-])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w-])", text)) - NO_VARIABLES


@lru_cache
def list_constants() -> dict[str, str]:
    """The variables that the code reads, with the constants that hold their names."""
    code = "".join(file.read_text() for file in (REPOSITORY / "highwater").rglob("*.py"))
    found = re.findall(r'^([A-Z_]+) = "((?:HIGHWATER|SPARK|DAGSTER)_[A-Z_]+)"$', code, re.MULTILINE)
    return {variable: constant for constant, variable in found}


def list_own_variables() -> set[str]:
    return {*list_constants()}
