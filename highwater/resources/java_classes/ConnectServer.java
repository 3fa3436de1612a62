package highwater.spark;

import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connect.service.SparkConnectService;
import org.apache.spark.sql.connect.service.SparkConnectService$;

/**
 * A Spark Connect server whose sessions share the code that Spark generates for their queries.
 *
 * <p>Spark's own server gives each session a class loader, for jars that its client may upload, and Spark compiles the
 * code of a query for each class loader. A run has sessions of its own, so it compiled some 150 classes again. Without
 * class loaders of their own, jars that one session uploads are there for all.
 */
public final class ConnectServer {
    /** The class loaders of the sessions on executors; those on the driver are off unless Spark's server is started. */
    private static final String ISOLATION = "spark.sql.artifact.isolation.enabled";
    private static final long LOOK_MS = 500;

    private ConnectServer() {}

    /** Serves until the Spark context ends; the exit status is one after which a service manager starts it again. */
    public static void main(String[] arguments) {
        try {
            serve();
        } catch (Throwable fault) {
            fault.printStackTrace();
        }
        System.exit(1); // no server ends well by itself
    }

    private static void serve() throws InterruptedException {
        SparkSession session = SparkSession.builder().config(ISOLATION, false).getOrCreate();
        // Only now: a client that came before had no session to begin from.
        SparkConnectService.start(session.sparkContext());
        System.err.println("Spark Connect listens at " + SparkConnectService$.MODULE$.bindingAddress());
        while (!session.sparkContext().isStopped()) {
            Thread.sleep(LOOK_MS);
        }
        System.err.println("the Spark context has ended");
    }
}
