package highwater.delta;

import io.delta.storage.CloseableIterator;
import io.delta.storage.HadoopFileSystemLogStore;
import io.delta.storage.LineCloseableIterator;
import java.io.BufferedWriter;
import java.io.FileInputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.StandardCopyOption;
import java.util.Iterator;
import java.util.UUID;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;

/**
 * Delta's log on local files, where any number of processes may write: each entry gets its name by a hard link.
 *
 * <p>Delta's own stores for local files look whether an entry exists and then rename a file to its name, which replaces
 * what another process wrote in between: of 400 entries that two of them wrote at once, both took 50. A link to a name
 * that exists fails. delta-rs writes its entries in the same way.
 *
 * <p>No file here has a checksum of Hadoop's beside it, which would no longer fit once delta-rs replaced the file.
 */
public final class LinkedFileLogStore extends HadoopFileSystemLogStore {
    public LinkedFileLogStore(Configuration hadoopConf) {
        super(hadoopConf);
    }

    @Override
    public CloseableIterator<String> read(Path path, Configuration hadoopConf) throws IOException {
        return new LineCloseableIterator(
                new InputStreamReader(new FileInputStream(local(path).toFile()), StandardCharsets.UTF_8));
    }

    @Override
    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration hadoopConf)
            throws IOException {
        java.nio.file.Path entry = local(path);
        // Readers of the log leave out names that begin with a dot.
        java.nio.file.Path written = entry.resolveSibling("." + entry.getFileName() + "." + UUID.randomUUID() + ".tmp");
        try {
            try (BufferedWriter file = Files.newBufferedWriter(written, StandardCharsets.UTF_8)) {
                while (actions.hasNext()) {
                    file.write(actions.next());
                    file.write('\n');
                }
            }
            if (overwrite) { // hints such as _last_checkpoint, whose last writer may win
                Files.move(written, entry, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
                // Hadoop's checksum of a former file would refuse this one, or the next by delta-rs.
                Files.deleteIfExists(entry.resolveSibling("." + entry.getFileName() + ".crc"));
            } else {
                Files.createLink(entry, written); // or java.nio.file.FileAlreadyExistsException, as Delta expects it
            }
        } catch (NoSuchFileException absent) { // the folder of the log
            throw (IOException) new FileNotFoundException(absent.getMessage()).initCause(absent);
        } finally {
            Files.deleteIfExists(written);
        }
    }

    private static java.nio.file.Path local(Path path) {
        return java.nio.file.Path.of(path.toUri().getPath());
    }

    /** Other files of the log are written by Hadoop, under their names. */
    @Override
    public Boolean isPartialWriteVisible(Path path, Configuration hadoopConf) {
        return true;
    }
}
