import java.io.*;
import java.nio.*;
import java.nio.channels.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.nio.file.attribute.*;
import java.util.*;
import java.util.stream.*;

/** Uses files in the working directory in all of Java's ways, and prints what it sees. */
public class Use {
    public static void main(String[] arguments) throws Exception {
        Path here = Path.of("").toAbsolutePath();
        Files.createDirectories(Path.of("a/b/c"));
        Files.writeString(Path.of("a/text"), "one\ntwo\n");
        Files.writeString(Path.of("a/text"), "three\n", StandardOpenOption.APPEND);
        System.out.println(Files.readAllLines(Path.of("a/text")));
        try (PrintWriter out = new PrintWriter(new FileWriter("a/b/old"))) {
            for (int i = 0; i < 1000; i++) out.println("line " + i);
        }
        try (BufferedReader in = new BufferedReader(new FileReader("a/b/old"))) {
            System.out.println(in.lines().mapToInt(String::length).sum());
        }
        try (RandomAccessFile file = new RandomAccessFile("a/random", "rw")) {
            file.setLength(100_000);
            file.seek(5000);
            file.writeInt(42);
            file.seek(5000);
            System.out.println(file.readInt() + " " + file.length() + " " + file.getFilePointer());
        }
        try (FileChannel channel = FileChannel.open(Path.of("a/random"), StandardOpenOption.READ, StandardOpenOption.WRITE)) {
            MappedByteBuffer map = channel.map(FileChannel.MapMode.READ_WRITE, 0, 100_000);
            System.out.println(map.getInt(5000));
            map.putLong(8192, 77);
            map.force();
            ByteBuffer buffer = ByteBuffer.allocateDirect(8);
            channel.read(buffer, 8192);
            buffer.flip();
            System.out.println(buffer.getLong());
            MappedByteBuffer own = channel.map(FileChannel.MapMode.PRIVATE, 4096, 8192);
            own.put(0, (byte) 9);
            System.out.println(own.getLong(4096) + " " + map.get(4096));
            try (FileLock lock = channel.tryLock(0, 10, false)) {
                System.out.println(lock.isValid() + " " + lock.isShared());
            }
            try (FileChannel copy = FileChannel.open(Path.of("a/copy"), StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE)) {
                System.out.println(channel.transferTo(0, channel.size(), copy));
                System.out.println(copy.transferFrom(channel, 100_000, 50));
            }
        }
        System.out.println(Files.mismatch(Path.of("a/random"), Path.of("a/copy")));
        Files.copy(Path.of("a/text"), Path.of("a/b/text"), StandardCopyOption.COPY_ATTRIBUTES);
        Files.move(Path.of("a/b/text"), Path.of("a/b/c/moved"), StandardCopyOption.ATOMIC_MOVE);
        Files.createSymbolicLink(Path.of("a/link"), Path.of("text"));
        Files.createLink(Path.of("a/hard"), Path.of("a/text"));
        System.out.println(Files.readSymbolicLink(Path.of("a/link")) + " " + Files.getAttribute(Path.of("a/text"), "unix:nlink"));
        Files.setPosixFilePermissions(Path.of("a/text"), PosixFilePermissions.fromString("rw-r-----"));
        Files.setLastModifiedTime(Path.of("a/text"), FileTime.fromMillis(1_000_000_000_000L));
        PosixFileAttributes attributes = Files.readAttributes(Path.of("a/text"), PosixFileAttributes.class);
        System.out.println(PosixFilePermissions.toString(attributes.permissions()) + " " + attributes.lastModifiedTime() + " " + attributes.size());
        try (Stream<Path> walk = Files.walk(Path.of("a"))) {
            System.out.println(walk.map(Path::toString).sorted().collect(Collectors.toList()));
        }
        String[] names = new File("a").list();
        Arrays.sort(names);
        System.out.println(Arrays.toString(names) + new File("a/none").exists() + new File("a").isDirectory());
        System.out.println(here.resolve("a/../a/link").toRealPath().equals(here.resolve("a/text").toRealPath()));
        try {
            Files.delete(Path.of("a/b"));
        } catch (DirectoryNotEmptyException error) {
            System.out.println("not empty: " + error.getMessage());
        }
        try {
            Files.readString(Path.of("a/none"));
        } catch (NoSuchFileException error) {
            System.out.println("none: " + error.getMessage());
        }
        Path temporary = Files.createTempFile(Path.of("a"), "t", null);
        System.out.println(Files.size(temporary) + " " + Files.deleteIfExists(temporary));
        List<Thread> threads = new ArrayList<>();
        for (int number = 0; number < 4; number++) {
            Path path = Path.of("a/thread" + number);
            threads.add(new Thread(() -> {
                try {
                    for (int i = 0; i < 50; i++) {
                        Files.writeString(path, "round " + i);
                        if (!Files.readString(path).equals("round " + i)) throw new IOException("other");
                    }
                } catch (IOException error) {
                    System.out.println(error);
                }
            }));
        }
        for (Thread thread : threads) thread.start();
        System.gc();
        for (Thread thread : threads) thread.join();
        Process child = new ProcessBuilder("cat", "a/thread0").directory(here.toFile()).start();
        System.out.println(new String(child.getInputStream().readAllBytes(), StandardCharsets.UTF_8) + " " + child.waitFor());
        FileStore store = Files.getFileStore(Path.of("a"));
        System.out.println(store.getTotalSpace() > 0);
    }
}
