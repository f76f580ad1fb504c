// Loads caches whose rows follow from their numbers, so that tests know what they must read.
// java -cp '.cache/ignite/lib/*' tests/ignite/Load.java ADDRESSES USER PASSWORD KEY_STORE|plain WHAT...

import java.math.BigDecimal;
import java.math.BigInteger;
import java.sql.Time;
import java.sql.Timestamp;
import java.time.LocalDate;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Date;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.function.LongFunction;
import org.apache.ignite.Ignition;
import org.apache.ignite.binary.BinaryObject;
import org.apache.ignite.binary.BinaryObjectBuilder;
import org.apache.ignite.cache.query.SqlFieldsQuery;
import org.apache.ignite.client.ClientCache;
import org.apache.ignite.client.IgniteClient;
import org.apache.ignite.client.SslMode;
import org.apache.ignite.cluster.ClusterState;
import org.apache.ignite.configuration.ClientConfiguration;

public class Load {
    enum Color { RED, GREEN, BLUE }

    static class Meta {
        int width;
        String country;
        Inner inner;
        Meta(int width, String country, Inner inner) { this.width = width; this.country = country; this.inner = inner; }
    }

    static class Inner {
        short depth;
        Inner(short depth) { this.depth = depth; }
    }

    static class Key {
        int a;
        String b;
        Key(int a, String b) { this.a = a; this.b = b; }
    }

    static class Row {
        byte tiny; short small; int whole; long large; float single; double twice; char letter; boolean flag;
        Byte boxedTiny; Long boxedLarge; Double maybe;
        String text; UUID id; Date date; Timestamp stamp; Time time; BigDecimal price; Color color;
        byte[] image; short[] shorts; int[] ints; long[] longs; float[] floats; double[] doubles;
        char[] chars; boolean[] flags;
        Meta meta; Meta again;
    }

    static Row row(long i) {
        Row row = new Row();
        row.tiny = (byte) (i % 100 - 50);
        row.small = (short) (i - 500);
        row.whole = (int) (i * 1000 - 7);
        row.large = i * 10_000_000_000L;
        row.single = i / 4f;
        row.twice = i / 3.0;
        row.letter = (char) ('a' + i % 26);
        row.flag = i % 3 == 0;
        row.boxedTiny = (byte) (i % 7);
        row.boxedLarge = -i;
        row.maybe = i % 5 == 0 ? null : i * 0.5;
        row.text = "row " + i + " \u00e4\u6f22";
        row.id = new UUID(0x0123456789abcdefL + i, -i);
        row.date = new Date(1_600_000_000_000L + i);
        row.stamp = new Timestamp(1_600_000_000_000L + i);
        row.stamp.setNanos((int) (123_000_000 + i));
        row.time = new Time(3_600_000L + i);
        row.price = new BigDecimal(BigInteger.valueOf(i % 2 == 0 ? i * 12345 : -i * 12345), 3);
        row.color = Color.values()[(int) (i % 3)];
        row.image = new byte[784];
        Arrays.fill(row.image, (byte) i);
        row.shorts = new short[] {(short) i, (short) -i};
        row.ints = new int[] {(int) i, (int) -i, 3};
        row.longs = new long[] {i, -i};
        row.floats = new float[] {i, i / 2f};
        row.doubles = new double[] {i, i / 2.0};
        row.chars = new char[] {'x', (char) ('a' + i % 26)};
        row.flags = new boolean[] {i % 2 == 0, true};
        row.meta = new Meta((int) (100 + i), i % 2 == 0 ? "DE" : "JP", new Inner((short) (i % 9)));
        row.again = row.meta;
        return row;
    }

    static <K> void load(IgniteClient client, String name, long rows, LongFunction<K> key, LongFunction<?> value) {
        ClientCache<K, Object> cache = client.getOrCreateCache(name);
        Map<K, Object> batch = new HashMap<>();
        for (long i = 0; i < rows; i++) {
            batch.put(key.apply(i), value.apply(i));
            if (batch.size() == 500) {
                cache.putAll(batch);
                batch.clear();
            }
        }
        if (!batch.isEmpty())
            cache.putAll(batch);
    }

    static BinaryObject person(IgniteClient client, long i) {
        BinaryObjectBuilder builder = client.binary().builder("example.Person").setField("age", (int) i);
        if (i >= 50)
            builder.setField("height", i / 2.0);
        if (i >= 80)
            builder.setField("city", "city " + i);
        return builder.build();
    }

    static BinaryObject image(IgniteClient client, long i, int size) {
        byte[] pixels = new byte[size];
        for (int j = 0; j < size; j++)
            pixels[j] = (byte) (i * 31 + j * 7);
        return client.binary().builder("example.Drawing").setField("image", pixels).setField("label", (int) (i % 10)).build();
    }

    static BinaryObject nested(IgniteClient client, long i) {
        List<Long> ids = new ArrayList<>();
        for (long j = 0; j < i % 4; j++)
            ids.add(i * 10 + j);
        Map<String, Object> map = new LinkedHashMap<>();
        map.put("k", i);
        map.put("l", new ArrayList<>(List.of(i / 2.0)));
        BinaryObject meta = client.binary().builder("example.Tag").setField("name", "tag " + i).setField("n", (int) i).build();
        return client.binary().builder("example.Nested")
            .setField("doubles", new ArrayList<>(List.of(i / 2.0, -i / 4.0)))
            .setField("ids", ids)
            .setField("matrix", new double[][] {{i, 1}, {2, i / 8.0}})
            .setField("boxes", new Object[] {(int) i, (int) -i, 7})
            .setField("words", new LinkedHashSet<>(List.of("a" + i, "b")))
            .setField("map", map)
            .setField("tags", new ArrayList<>(List.of(meta, meta)))
            .setField("text", i % 3 == 0 ? null : "text " + i, String.class)
            .setField("count", i % 5 == 0 ? null : (Integer) (int) i, Integer.class)
            .build();
    }

    static BinaryObject mixed(IgniteClient client, long i) {
        BinaryObjectBuilder builder = client.binary().builder("example.Mixed");
        for (int j = 0; j < 5; j++) {
            builder.setField("i" + j, (int) (i + j));
            builder.setField("l" + j, i * j);
            builder.setField("d" + j, i / (j + 1.0));
        }
        for (int j = 0; j < 2; j++) {
            builder.setField("f" + j, (float) i);
            builder.setField("b" + j, (i & 1 << j) != 0);
        }
        return builder.setField("text", "text of row " + i).build();
    }

    static void loadTypes(IgniteClient client) {
        load(client, "grid16_types", 200, i -> i, Load::row);
        load(client, "grid16_texts", 300, i -> "key " + i, i -> (int) i);
        load(client, "grid16_keys", 100, i -> new Key((int) i, "b" + i), i -> i / 8.0);
        load(client, "grid16_uuids", 50, i -> new UUID(i, -i), i -> "value " + i);
        load(client, "grid16_people", 100, i -> (int) i, i -> person(client, i));
        load(client, "grid16_two_classes", 20, i -> (int) i,
            i -> i % 2 == 0 ? (Object) person(client, 1) : image(client, i, 4));
        load(client, "grid16_unusable", 10, i -> i, i -> client.binary().builder("example.Unusable")
            .setField("numbers", new ArrayList<>(List.of(1, 2))).setField("names", new String[] {"a", "b"})
            .setField("map", new HashMap<>(Map.of("a", 1))).setField("day", LocalDate.of(2024, 1, 1))
            .setField("good", (int) i).build());
        load(client, "grid16_nested", 40, i -> i, i -> nested(client, i));
        load(client, "grid16_lists", 60, i -> i, i -> new int[(int) (i % 5)]);
        load(client, "replicated_numbers", 500, i -> i, i -> (int) (i * i));
        load(client, "defaults", 5000, i -> i, i -> i * 3);
        client.getOrCreateCache("grid16_empty");
        client.query(new SqlFieldsQuery("CREATE TABLE IF NOT EXISTS CITY (ID INT PRIMARY KEY, NAME VARCHAR, "
            + "PEOPLE BIGINT) WITH \"template=grid16\"")).getAll();
        client.query(new SqlFieldsQuery("CREATE TABLE IF NOT EXISTS VISIT (PERSON INT, PLACE VARCHAR, HOURS DOUBLE, "
            + "DAY DATE, "
            + "PRIMARY KEY (PERSON, PLACE))")).getAll();
        for (int i = 0; i < 40; i++) {
            client.query(new SqlFieldsQuery("MERGE INTO CITY (ID, NAME, PEOPLE) VALUES (?, ?, ?)")
                .setArgs(i, "city " + i, i * 1000L)).getAll();
            client.query(new SqlFieldsQuery("MERGE INTO VISIT (PERSON, PLACE, HOURS, DAY) VALUES (?, ?, ?, ?)")
                .setArgs(i, "place " + i, i / 2.0, java.sql.Date.valueOf(LocalDate.ofEpochDay(-i)))).getAll();
        }
    }

    // Compares what insitu has exported with what Java itself would write.
    static void checkExported(IgniteClient client, String name, long rows) {
        ClientCache<Long, BinaryObject> cache = client.cache(name).withKeepBinary();
        for (long i = 0; i < rows; i++) {
            BinaryObject found = cache.get(i);
            byte[] pixels = new byte[12];
            for (int j = 0; j < pixels.length; j++)
                pixels[j] = (byte) (i + j);
            BinaryObject meta = client.binary().builder("example.Exported.meta").setField("width", (int) i)
                .setField("country", i % 2 == 0 ? "DE" : "\u65e5\u672c").build();
            BinaryObject expected = client.binary().builder("example.Exported").setField("image", pixels)
                .setField("score", i / 8.0f).setField("meta", meta).build();
            if (!expected.equals(found) || expected.hashCode() != found.hashCode())
                throw new IllegalStateException("row " + i + ": " + found + ", expected " + expected);
        }
    }

    static void put(IgniteClient client, String cache, long from, long to) {
        ClientCache<Long, Object> target = client.getOrCreateCache(cache);
        for (long i = from; i < to; i++)
            target.put(i, (int) i);
    }

    public static void main(String[] arguments) throws Exception {
        ClientConfiguration configuration = new ClientConfiguration().setAddresses(arguments[0].split(","));
        if (!arguments[1].isEmpty())
            configuration.setUserName(arguments[1]).setUserPassword(arguments[2]);
        if (!arguments[3].equals("plain"))
            configuration.setSslMode(SslMode.REQUIRED).setSslTrustAll(true)
                .setSslClientCertificateKeyStorePath(arguments[3])
                .setSslClientCertificateKeyStoreType("PKCS12")
                .setSslClientCertificateKeyStorePassword("insitu");
        try (IgniteClient client = Ignition.startClient(configuration)) {
            for (int i = 4; i < arguments.length; i++) {
                String[] what = arguments[i].split(":");
                switch (what[0]) {
                    case "activate": client.cluster().state(ClusterState.ACTIVE); break;
                    case "types": loadTypes(client); break;
                    case "images": load(client, what[1], Long.parseLong(what[2]), n -> n, n -> image(client, n, 784)); break;
                    case "mixed": load(client, what[1], Long.parseLong(what[2]), n -> n, n -> mixed(client, n)); break;
                    case "exported": checkExported(client, what[1], Long.parseLong(what[2])); break;
                    case "large": load(client, what[1], 2, n -> n, n -> new byte[Integer.parseInt(what[2])]); break;
                    case "numbers": put(client, what[1], Long.parseLong(what[2]), Long.parseLong(what[3])); break;
                    default: throw new IllegalArgumentException(arguments[i]);
                }
            }
        }
        System.out.println("loaded");
    }
}
