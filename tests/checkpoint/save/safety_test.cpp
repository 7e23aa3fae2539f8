// Saves that fail on one rank, writers that compete, and damage to a checkpoint.
#include <gmock/gmock.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/formats/index.h>
#include <tessera/checkpoint/hugging_face.h>
#include <torch/torch.h>

#include <sys/mount.h>
#include <unistd.h>

#include <csignal>
#include <random>
#include <thread>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/checkpoint/small_disk.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::checkpoint::safety_test {
namespace {

using testing::error_of;
using testing::FileSizeLimit;
using ::testing::HasSubstr;
using testing::last_rank;
using testing::make_disk;
using testing::read_text;
using testing::SharedFolder;
using testing::SmallDisk;
using testing::world_rank;
using testing::write_text;

StateDict state_of(int64_t elements, double value) {
  StateDict state;
  state.add(c10::str("rank", world_rank(), ".large"), torch::full({elements}, value));
  state.add(c10::str("rank", world_rank(), ".small"), torch::full({3, 5}, value));
  state.set("value", value);
  return state;
}

void expect_loads(const std::filesystem::path& checkpoint, int64_t elements, double value) {
  auto state = state_of(elements, -1);
  load(state, checkpoint);
  EXPECT_TRUE((state.tensor(c10::str("rank", world_rank(), ".large")) == value).all().item<bool>());
  EXPECT_EQ(state.value<double>("value"), value);
}

TEST(Safety, AWriteErrorOfOneRankIsAnErrorOnAllAndTheOldCheckpointStays) {
  const SharedFolder folder;
  const auto path = folder.path() / "c";
  save(state_of(500'000, 1), path);
  std::optional<FileSizeLimit> limit;
  if (world_rank() == last_rank()) limit.emplace(1 << 20);
  SaveOptions overwrite;
  overwrite.overwrite = true;
  const auto error = error_of([&] { save(state_of(500'000, 2), path, overwrite); });
  limit.reset();
  EXPECT_THAT(error, HasSubstr(c10::str("rank ", last_rank(), ": cannot write")));
  EXPECT_THAT(error, HasSubstr("File too large"));
  SharedFolder::barrier();
  expect_loads(path, 500'000, 1);
  int entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) ++entries;
  EXPECT_EQ(entries, 2); // the checkpoint and the link to it
  SharedFolder::barrier();
}

TEST(Safety, AFullDiskIsAnErrorOnAllAndTheOldCheckpointStays) {
  const SharedFolder folder;
  const auto small = folder.path() / "disk";
  std::optional<SmallDisk> disk;
  if (!make_disk(disk, small, "size=6m", 0)) GTEST_SKIP() << "may not mount a file system";
  save(state_of(100'000, 1), small / "first");
  EXPECT_THAT(error_of([&] { save(state_of(3'000'000, 2), small / "second"); }), HasSubstr("No space left on device"));
  SharedFolder::barrier();
  expect_loads(small / "first", 100'000, 1);
  expect_loads(small / "latest", 100'000, 1);
  save(state_of(100'000, 3), small / "second"); // what the failed save wrote is gone
  expect_loads(small / "second", 100'000, 3);
  SharedFolder::barrier();
}

TEST(Safety, AMountPointIsRefusedBeforeAnythingIsWritten) {
  const SharedFolder folder;
  const auto small = folder.path() / "disk";
  std::optional<SmallDisk> disk;
  if (!make_disk(disk, small, "size=6m", 0)) GTEST_SKIP() << "may not mount a file system";
  auto weights = state_of(10, 1);
  weights.erase("value");
  EXPECT_THAT(error_of([&] { save_hugging_face(weights, small); }),
              ::testing::AllOf(HasSubstr("cannot start to save"), HasSubstr("disk is a mount point")));
  save_hugging_face(weights, small / "model");
  SharedFolder::barrier();
  EXPECT_TRUE(std::filesystem::exists(small / "model" / "model.safetensors"));
  SharedFolder::barrier();
  const auto bound = folder.path() / "bound"; // of the same file system as the folder above it
  if (world_rank() == 0) {
    std::filesystem::create_directories(bound);
    std::filesystem::create_directories(folder.path() / "there");
    ASSERT_EQ(::mount((folder.path() / "there").c_str(), bound.c_str(), nullptr, MS_BIND, nullptr), 0);
  }
  SharedFolder::barrier();
  EXPECT_THAT(error_of([&] { save_hugging_face(weights, bound); }), HasSubstr("bound is a mount point"));
  SharedFolder::barrier();
  if (world_rank() == 0) ::umount2(bound.c_str(), MNT_DETACH);
}

TEST(Safety, AReadOnlyFolderIsAnErrorOnAll) {
  const SharedFolder folder;
  const auto small = folder.path() / "disk";
  std::optional<SmallDisk> disk;
  if (!make_disk(disk, small, "size=1m", MS_RDONLY)) GTEST_SKIP() << "may not mount a file system";
  const auto error = error_of([&] { save(state_of(10, 1), small / "c"); });
  EXPECT_THAT(error, HasSubstr("rank 0: "));
  EXPECT_THAT(error, HasSubstr("Read-only file system"));
  SharedFolder::barrier();
}

// Without the rights of root, whom permissions do not stop.
class AsUser {
 public:
  AsUser() : was_root_(::geteuid() == 0) { EXPECT_EQ(was_root_ ? ::seteuid(65534) : 0, 0); }
  AsUser(const AsUser&) = delete;
  AsUser& operator=(const AsUser&) = delete;
  ~AsUser() { EXPECT_EQ(was_root_ ? ::seteuid(0) : 0, 0); }

 private:
  bool was_root_;
};

TEST(Safety, AFolderWithoutWritePermissionIsAnErrorOnAll) {
  const SharedFolder folder;
  const auto parent = folder.path() / "kept";
  if (world_rank() == 0) {
    using std::filesystem::perms;
    std::filesystem::create_directory(parent);
    std::filesystem::permissions(parent, perms(0555));
    std::filesystem::permissions(folder.path(), perms(0755));
  }
  SharedFolder::barrier();
  std::string error;
  {
    const AsUser user;
    error = error_of([&] { save(state_of(10, 1), parent / "c"); });
  }
  EXPECT_THAT(error, HasSubstr("rank 0: "));
  EXPECT_THAT(error, HasSubstr("Permission denied"));
  EXPECT_THAT(error, HasSubstr(parent.string()));
  EXPECT_TRUE(std::filesystem::is_empty(parent));
  SharedFolder::barrier();
}

TEST(Safety, ATruncatedFileIsNamedOnEveryRank) {
  const SharedFolder folder;
  const auto path = folder.path() / "c";
  save(state_of(10, 1), path);
  const auto file = internal::read_index(path).files.back();
  SharedFolder::barrier();
  if (world_rank() == 0) std::filesystem::resize_file(path / file.name, static_cast<uintmax_t>(file.bytes) - 1);
  SharedFolder::barrier();
  EXPECT_THAT(error_of([&] { load(state_of(10, 1), path); }),
              HasSubstr(c10::str("rank ", last_rank(), ": ", (path / file.name).string(), " has ", file.bytes - 1,
                                 " bytes where the checkpoint wrote ", file.bytes)));
  SharedFolder::barrier();
}

TEST(Safety, AVanishedFileIsNamedOnEveryRank) {
  const SharedFolder folder;
  const auto path = folder.path() / "c";
  save(state_of(10, 1), path);
  const auto gone = internal::read_index(path).files.back().name;
  SharedFolder::barrier();
  if (world_rank() == 0) std::filesystem::remove(path / gone);
  SharedFolder::barrier();
  EXPECT_THAT(error_of([&] { load(state_of(10, 1), path); }),
              HasSubstr(c10::str("rank ", last_rank(), ": cannot open ", (path / gone).string(), ": No such file or directory")));
}

TEST(Safety, OfTwoWritersToOneFolderOneWins) {
  if (last_rank() > 0) GTEST_SKIP() << "two threads of one process, without a process group between them";
  const SharedFolder folder;
  for (int i = 0; i < 20; ++i) {
    const auto path = folder.path() / std::to_string(i);
    std::string errors[2];
    const auto write = [&](int writer) { errors[writer] = error_of([&] { save(state_of(50'000, writer), path); }); };
    std::thread first(write, 0), second(write, 1);
    first.join();
    second.join();
    ASSERT_NE(errors[0] == "no error", errors[1] == "no error") << errors[0] << "\n" << errors[1];
    EXPECT_THAT(errors[0] + errors[1], HasSubstr("xists")); // "exists already", or from the rename "File exists"
    expect_loads(path, 50'000, errors[0] == "no error" ? 0 : 1);
  }
}

TEST(Safety, OfASaveInTheBackgroundAndAnotherToOneFolderOneWins) {
  const SharedFolder folder;
  Checkpointer background;
  for (int i = 0; i < 10; ++i) {
    const auto path = folder.path() / std::to_string(i);
    background.save(state_of(50'000, 1), path);
    const auto error = error_of([&] { save(state_of(50'000, 2), path); });
    const auto background_error = error_of([&] { background.wait(); });
    EXPECT_NE(error == "no error", background_error == "no error") << error << "\n" << background_error;
    EXPECT_THAT(error + background_error, HasSubstr("xists"));
    expect_loads(path, 50'000, error == "no error" ? 2 : 1);
  }
}

// The tensor that a byte of a data file belongs to; empty for the header.
std::string tensor_at(const internal::Index& index, const std::string& file, int64_t byte) {
  for (const auto& tensor : index.tensors) {
    for (const auto& chunk : tensor.chunks) {
      const auto bytes = chunk.box.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
      if (index.files[chunk.file].name == file && byte >= chunk.begin && byte < chunk.begin + bytes) return tensor.name;
    }
  }
  return "";
}

TEST(Safety, EveryFlippedByteIsFoundAndNamed) {
  const SharedFolder folder;
  const auto path = folder.path() / "c";
  save(state_of(1'000, 1), path);
  if (world_rank() != 0) return;
  const auto index = internal::read_index(path);
  std::vector<std::pair<std::string, std::string>> files{{internal::kIndexName, read_text(path / internal::kIndexName)}};
  for (const auto& file : index.files) files.emplace_back(file.name, read_text(path / file.name));
  std::mt19937 generator(1);
  for (int i = 0; i < 1000; ++i) {
    const auto& [name, whole] = files[generator() % files.size()];
    auto damaged = whole;
    const auto byte = generator() % whole.size();
    damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << generator() % 8));
    write_text(path / name, damaged);
    const auto findings = verify(path);
    ASSERT_EQ(findings.size(), 1) << name << " byte " << byte;
    ASSERT_THAT(findings[0], HasSubstr(name));
    const auto tensor = tensor_at(index, name, static_cast<int64_t>(byte));
    const auto expected = tensor.empty() ? name : "tensor \"" + tensor + "\"";
    ASSERT_THAT(findings[0], HasSubstr(expected));
    if (last_rank() == 0) {
      const auto error = error_of([&] { load(state_of(1'000, 1), path); });
      ASSERT_THAT(error, ::testing::AllOf(HasSubstr(name), HasSubstr(expected))) << " byte " << byte;
    }
    write_text(path / name, whole);
  }
  EXPECT_TRUE(verify(path).empty());
  std::printf("1000 flipped bytes in %zu files: each was found and named\n", files.size());
}

} // namespace
} // namespace tessera::checkpoint::safety_test
