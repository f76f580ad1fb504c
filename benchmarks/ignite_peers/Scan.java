// Reads all rows of a cache by Java's thin client, each partition from its primary node, every field of each, and prints rows per second.
// java -cp '.cache/ignite/lib/*' Scan.java ADDRESSES CACHE PARTITIONS ROUNDS

import java.util.ArrayList;
import java.util.List;
import javax.cache.Cache;
import org.apache.ignite.Ignition;
import org.apache.ignite.binary.BinaryObject;
import org.apache.ignite.cache.query.QueryCursor;
import org.apache.ignite.cache.query.ScanQuery;
import org.apache.ignite.client.ClientCache;
import org.apache.ignite.client.IgniteClient;
import org.apache.ignite.configuration.ClientConfiguration;

public class Scan {
    static long seen;

    public static void main(String[] arguments) throws Exception {
        ClientConfiguration configuration = new ClientConfiguration().setAddresses(arguments[0].split(","));
        try (IgniteClient client = Ignition.startClient(configuration)) {
            ClientCache<Object, BinaryObject> cache = client.cache(arguments[1]).withKeepBinary();
            int partitions = Integer.parseInt(arguments[2]), rounds = Integer.parseInt(arguments[3]);
            for (int round = 0; round <= rounds; round++) {
                long started = System.nanoTime(), rows = 0;
                List<String> fields = null;
                for (int partition = 0; partition < partitions; partition++) {
                    ScanQuery<Object, BinaryObject> query = new ScanQuery<Object, BinaryObject>()
                        .setPartition(partition).setPageSize(4096);
                    try (QueryCursor<Cache.Entry<Object, BinaryObject>> cursor = cache.query(query)) {
                        for (Cache.Entry<Object, BinaryObject> entry : cursor) {
                            BinaryObject value = entry.getValue();
                            if (fields == null)
                                fields = new ArrayList<>(value.type().fieldNames());
                            for (String field : fields)
                                seen += value.field(field).hashCode();
                            rows++;
                        }
                    }
                }
                if (round > 0)  // the first one warms up
                    System.out.println(rows * 1e9 / (System.nanoTime() - started));
            }
        }
        System.err.println(seen);
    }
}
