import java.io.File;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/** HDFS of one name node and one data node, which ends when its input does. */
public class Hdfs {
  public static void main(String[] arguments) throws Exception {
    Configuration settings = new Configuration();
    settings.set("dfs.permissions.enabled", "false");
    settings.set("dfs.namenode.fs-limits.min-block-size", "1048576");
    settings.set("dfs.blocksize", "1048576");
    MiniDFSCluster cluster =
        new MiniDFSCluster.Builder(settings, new File(arguments[0])).numDataNodes(1).build();
    cluster.waitActive();
    System.out.println(
        "up " + cluster.getNameNodePort() + " " + cluster.getNameNode().getHttpAddress().getPort());
    System.in.read();
    cluster.shutdown();
    System.exit(0);
  }
}
