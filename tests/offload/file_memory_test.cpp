// Files as memory, and what moves their bytes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/tensor_over.h>
#include <tessera/offload/borrowed_regions.h>
#include <tessera/offload/file_memory.h>
#include <tessera/offload/host_memory.h>
#include <tessera/offload/make_offload_memory.h>
#include <tessera/offload/transfers.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <vector>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::file_memory_test {
namespace {

using internal::Direction;
using internal::FileMemory;

constexpr int64_t kMegabyte = int64_t{1} << 20;

torch::Tensor allocate(internal::OffloadMemory& memory, int64_t bytes) {
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, memory.allocate(bytes));
  return internal::tensor_over(storage, 0, {bytes}, torch::kByte);
}

/// Bytes that differ from page to page, in whole pages of memory.
torch::Tensor pages(int64_t bytes, int64_t seed) {
  auto made = internal::tensor_over(internal::aligned_memory(bytes), 0, {bytes}, torch::kByte);
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  return made.copy_(torch::randint(0, 256, {bytes}, generator, torch::kByte));
}

std::vector<std::shared_ptr<internal::Transfers>> engines() {
  std::vector<std::shared_ptr<internal::Transfers>> all{internal::make_thread_transfers()};
  if (auto ring = internal::make_uring_transfers()) all.push_back(ring);
  return all;
}

TEST(Transfers, MoveManyPiecesAtOnce) {
  const TemporaryFolder folder;
  for (const auto& engine : engines()) {
    const int fd = ::open(folder.file("pieces").c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    const int64_t bytes = 70 * kMegabyte; // more pieces than a ring takes
    const auto source = pages(bytes, 1), target = torch::zeros({bytes}, torch::kByte);
    internal::TransferState written, read;
    engine->start({{fd, Direction::kWrite, static_cast<char*>(source.data_ptr()), 0, bytes}}, written);
    engine->wait(written);
    EXPECT_EQ(written.error, 0);
    std::vector<internal::TransferPiece> pieces;
    for (int64_t i = 0; i < 4; ++i)
      pieces.push_back({fd, Direction::kRead, static_cast<char*>(target.data_ptr()) + i * bytes / 4, i * bytes / 4, bytes / 4});
    engine->start(pieces, read);
    engine->wait(read);
    EXPECT_EQ(read.error, 0);
    EXPECT_TENSORS_EQUAL(target, source);
    ::close(fd);
  }
}

TEST(Transfers, ReportTheFirstError) {
  const TemporaryFolder folder;
  for (const auto& engine : engines()) {
    const int fd = ::open(folder.write("short", "abc").c_str(), O_RDONLY | O_CLOEXEC);
    std::vector<char> memory(5000);
    internal::TransferState past_the_end, read_only;
    engine->start({{fd, Direction::kRead, memory.data(), 0, 5000}}, past_the_end);
    engine->start({{fd, Direction::kWrite, memory.data(), 0, 10}}, read_only);
    engine->wait(read_only);
    engine->wait(past_the_end);
    EXPECT_EQ(past_the_end.error, EIO);
    EXPECT_EQ(read_only.error, EBADF);
    ::close(fd);
  }
}

TEST(FileMemory, MappingsAndTransfersSeeEachOther) {
  const TemporaryFolder folder;
  const auto memory = FileMemory::create(folder.path());
  RecordProperty("direct", memory->is_direct());
  const int64_t bytes = 3 * kMegabyte + 5000;
  const auto one = allocate(*memory, bytes), other = allocate(*memory, bytes); // neighbours in the file
  EXPECT_EQ(one.sum().item<int64_t>(), 0);
  auto buffer = pages(bytes, 0);
  for (int64_t round = 0; round < 20; ++round) {
    const auto values = pages(bytes, 2 * round), beside = pages(bytes, 2 * round + 1);
    one.copy_(values); // through the mapping
    other.copy_(beside);
    memory->fetch(one, buffer)->wait();
    EXPECT_TENSORS_EQUAL(buffer, values);
    memory->store({beside}, {one}); // beside a page cache that holds the other's changes
    other.narrow(0, 4000, 200).fill_(round);
    EXPECT_TENSORS_EQUAL(one, beside);
    beside.narrow(0, 4000, 200).fill_(round);
    memory->fetch(other, buffer)->wait();
    EXPECT_TENSORS_EQUAL(buffer, beside);
    one.narrow(0, 100, 5000).fill_(7); // a page that the transfer wrote
    memory->fetch(one, buffer)->wait();
    EXPECT_TENSORS_EQUAL(buffer, one);
  }
}

TEST(FileMemory, UsesFreedRegionsAgain) {
  const TemporaryFolder folder;
  const auto memory = FileMemory::create(folder.path());
  memory->reserve(kMegabyte);
  EXPECT_EQ(memory->bytes(), kMegabyte);
  {
    std::vector<torch::Tensor> parts;
    for (int i = 0; i < 4; ++i) parts.push_back(allocate(*memory, kMegabyte / 4));
    parts.erase(parts.begin() + 1, parts.begin() + 3);
    parts.push_back(allocate(*memory, kMegabyte / 2)); // where two neighbours were
    parts.push_back(allocate(*memory, 0));
    EXPECT_EQ(memory->bytes(), kMegabyte + internal::kPageBytes);
  }
  const auto whole = allocate(*memory, kMegabyte);
  EXPECT_EQ(memory->bytes(), kMegabyte + internal::kPageBytes);
}

TEST(FileMemory, OutlivesItsFolder) {
  std::shared_ptr<FileMemory> memory;
  {
    const TemporaryFolder folder;
    memory = FileMemory::create(folder.path());
  }
  const auto tensor = allocate(*memory, 10000), values = pages(10000, 1);
  memory->store({values}, {tensor});
  EXPECT_TENSORS_EQUAL(tensor, values);
  memory = nullptr;
  EXPECT_TENSORS_EQUAL(tensor, values) << "a tensor keeps its file";
}

TEST(FileMemory, LendsRegionsToTheHost) {
  const TemporaryFolder folder;
  const auto memory = FileMemory::create(folder.path());
  const auto first = allocate(*memory, 10000), second = allocate(*memory, kMegabyte), view = first.narrow(0, 50, 10);
  first.fill_(1);
  second.fill_(2);
  const void* const mapped = first.data_ptr();
  internal::BorrowedRegions lent;
  for (int round = 0; round < 3; ++round) {
    lent.load({first.storage().getWeakStorageImpl().lock(), second.storage().getWeakStorageImpl().lock()});
    lent.attach();
    EXPECT_NE(first.data_ptr(), mapped);
    view.add_(1);
    second.add_(1);
    lent.detach();
    EXPECT_EQ(first.data_ptr(), mapped);
    lent.store({true, false});
    lent.finish();
    EXPECT_TRUE(view.eq(2 + round).all().item<bool>());
    EXPECT_TRUE(second.eq(2).all().item<bool>()) << "it was not stored";
  }
}

TEST(HostMemory, CopiesToTheDeviceAndBack) {
  const auto memory = internal::make_host_memory(/*pinned=*/false);
  const auto state = allocate(*memory, 100), values = torch::arange(100, torch::kByte),
             device = torch::zeros({100}, torch::kByte);
  EXPECT_TENSORS_EQUAL(state, device);
  memory->store({values}, {state});
  memory->fetch(state, device)->wait();
  EXPECT_TENSORS_EQUAL(device, values);
}

TEST(HostMemory, NeedsADeviceToBePageLockedFor) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "there is a CUDA device";
  EXPECT_THROWS_WITH(internal::make_offload_memory(offload_to_host(), c10::Device(torch::kCUDA, 0)),
                     "page-locked memory needs a CUDA device and LibTorch's CUDA libraries, which this process has not");
  EXPECT_FALSE(internal::make_offload_memory(offload_to_host(), torch::kCPU)) << "the host's memory is the device's";
}

} // namespace
} // namespace tessera::testing::file_memory_test
