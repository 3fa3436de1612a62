#!/bin/sh
# Spark on Kubernetes starts the pod of an executor by the one argument `executor`; all else is in variables.
# Every other command is carried out as it is.
set -eu

if [ "${1:-}" != executor ]; then
    exec "$@"
fi

# One option of Java in each of SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1 and so on; any may have spaces.
set --
number=0
while eval "option=\${SPARK_JAVA_OPT_$number:-}" && [ -n "$option" ]; do
    set -- "$@" "$option"
    number=$((number + 1))
done

jars=$(python -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent / "jars")')
exec java "$@" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_CONF_DIR:+$SPARK_CONF_DIR:}${SPARK_CLASSPATH:+$SPARK_CLASSPATH:}$jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
