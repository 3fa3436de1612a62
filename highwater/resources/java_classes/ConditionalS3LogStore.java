package highwater.delta;

import io.delta.storage.S3SingleDriverLogStore;
import java.io.ByteArrayOutputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.s3a.S3AFileSystem;
import org.apache.hadoop.fs.s3a.S3AInternals;
import org.apache.hadoop.fs.store.audit.AuditSpan;
import software.amazon.awssdk.awscore.AwsRequestOverrideConfiguration;
import software.amazon.awssdk.awscore.exception.AwsServiceException;
import software.amazon.awssdk.core.exception.SdkException;
import software.amazon.awssdk.core.sync.RequestBody;
import software.amazon.awssdk.services.s3.S3Client;
import software.amazon.awssdk.services.s3.model.PutObjectRequest;

/**
 * Delta's log on S3, where any number of drivers may write: each entry is created by a conditional PUT.
 *
 * <p>Delta's own store for S3 looks whether an entry exists and then writes it. Two drivers can both find it absent, and
 * the later one overwrites the commit of the other. With {@code If-None-Match: *} the store refuses the later PUT, and
 * Delta resolves the conflict as on any other file system.
 *
 * <p>The request carries its header by itself, so that releases of the AWS SDK without a method for it serve too.
 */
public final class ConditionalS3LogStore extends S3SingleDriverLogStore {
    /** Begins the message of a store that ignores the condition; highwater.resources.spark looks for it. */
    static final String UNSAFE = "HIGHWATER_UNSAFE_STORE";

    /** S3 answers 409 where a request for the same key is under way, and asks for another try. */
    private static final int TRIES = 8;
    private static final long FIRST_WAIT_MS = 50;
    private static final int CONFLICT = 409;
    private static final int PRECONDITION_FAILED = 412;
    private static final String WRITER = "highwater-writer";

    /** Buckets whose store was seen to honour the condition, for the life of the JVM. */
    private static final Set<String> PROBED = ConcurrentHashMap.newKeySet();

    public ConditionalS3LogStore(Configuration hadoopConf) {
        super(hadoopConf);
    }

    @Override
    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration hadoopConf)
            throws IOException {
        if (overwrite) { // hints such as _last_checkpoint, whose last writer may win
            super.write(path, actions, true, hadoopConf);
            return;
        }
        S3AFileSystem s3a = s3a(path, hadoopConf);
        byte[] content = encoded(actions);
        try (AuditSpan span = s3a.createSpan("delta_commit", path.toString(), null)) {
            probe(s3a, path.getParent());
            putIfAbsent(s3a, path, content);
        }
    }

    private static S3AFileSystem s3a(Path path, Configuration hadoopConf) throws IOException {
        FileSystem found = path.getFileSystem(hadoopConf);
        if (found instanceof S3AFileSystem) {
            return (S3AFileSystem) found;
        }
        throw new IOException(
                ConditionalS3LogStore.class.getName() + " writes through Hadoop's S3AFileSystem, and " + path
                        + " is opened by " + found.getClass().getName() + ": name the lake s3a://");
    }

    private static byte[] encoded(Iterator<String> actions) {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        while (actions.hasNext()) {
            bytes.writeBytes((actions.next() + "\n").getBytes(StandardCharsets.UTF_8));
        }
        return bytes.toByteArray();
    }

    /**
     * Create an object, or fail if it exists.
     *
     * <p>The SDK repeats a request whose answer was lost, and the repetition then meets the object of the first. So each
     * object carries who wrote it, and a writer that finds its own has succeeded.
     */
    private static void putIfAbsent(S3AFileSystem s3a, Path path, byte[] content) throws IOException {
        String writer = UUID.randomUUID().toString();
        for (int tries = 1; ; tries++) {
            try {
                put(s3a, path, content, writer);
                return;
            } catch (SdkException error) {
                int status = status(error);
                if (isWrittenBy(s3a, path, writer, error)) {
                    return;
                }
                if (status == PRECONDITION_FAILED) {
                    throw new FileAlreadyExistsException(path.toString());
                }
                if (status != CONFLICT || tries == TRIES) {
                    throw new IOException("The log entry " + path + " could not be written: " + error, error);
                }
                pause(FIRST_WAIT_MS << tries);
            }
        }
    }

    private static void put(S3AFileSystem s3a, Path path, byte[] content, String writer) {
        String key = s3a.pathToKey(path);
        // The builder of S3A brings encryption, ACL and storage class along, as the file system is configured.
        PutObjectRequest plain = s3a.newPutObjectRequestBuilder(key, content.length, false).build();
        Map<String, String> metadata = new HashMap<>(plain.metadata());
        metadata.put(WRITER, writer);
        AwsRequestOverrideConfiguration.Builder conditional =
                plain.overrideConfiguration()
                        .map(AwsRequestOverrideConfiguration::toBuilder)
                        .orElseGet(AwsRequestOverrideConfiguration::builder)
                        .putHeader("If-None-Match", "*");
        PutObjectRequest request =
                plain.toBuilder().metadata(metadata).overrideConfiguration(conditional.build()).build();
        client(s3a).putObject(request, RequestBody.fromBytes(content));
    }

    private static S3Client client(S3AFileSystem s3a) {
        return s3a.getS3AInternals().getAmazonS3Client("a conditional PUT of Delta's log");
    }

    /** Whether an object is there and names the writer; an error of this look is added to the one that led to it. */
    private static boolean isWrittenBy(S3AFileSystem s3a, Path path, String writer, SdkException cause) {
        S3AInternals internals = s3a.getS3AInternals();
        try {
            return writer.equals(internals.getObjectMetadata(path).metadata().get(WRITER));
        } catch (FileNotFoundException absent) {
            return false;
        } catch (IOException error) {
            cause.addSuppressed(error);
            return false;
        }
    }

    /** See once in each JVM that the store refuses a second PUT of the same key. */
    private static void probe(S3AFileSystem s3a, Path folder) throws IOException {
        String store = s3a.getUri().toString();
        if (PROBED.contains(store)) {
            return;
        }
        try {
            if (!refusesSecondPut(s3a, new Path(folder, ".highwater-probe-" + UUID.randomUUID()))) {
                throw new IOException(
                        UNSAFE + ": the object store at " + store + " ignores If-None-Match, so a second driver could"
                                + " overwrite a commit; nothing was written");
            }
        } catch (SdkException error) {
            throw new IOException("The object store at " + store + " could not be probed: " + error, error);
        }
        PROBED.add(store);
    }

    private static boolean refusesSecondPut(S3AFileSystem s3a, Path path) {
        try {
            put(s3a, path, new byte[0], "first");
            put(s3a, path, new byte[0], "second");
            return false;
        } catch (SdkException error) {
            if (status(error) == PRECONDITION_FAILED) {
                return true;
            }
            throw error;
        } finally {
            client(s3a).deleteObject(request -> request.bucket(s3a.getBucket()).key(s3a.pathToKey(path)));
        }
    }

    private static int status(SdkException error) {
        return error instanceof AwsServiceException ? ((AwsServiceException) error).statusCode() : 0;
    }

    private static void pause(long milliseconds) throws InterruptedIOException {
        try {
            Thread.sleep(milliseconds);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            throw new InterruptedIOException(error.getMessage());
        }
    }
}
