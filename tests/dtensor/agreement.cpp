#include "agreement.h"

#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <tessera/collectives/communicator.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

namespace tessera::testing {

/// In memory that all ranks map; zeros are its first state.
struct Agreement::Board {
  std::atomic<int> arrived, refused;
  std::atomic<uint32_t> round;
  std::array<std::atomic<bool>, 2> verdicts; ///< of this round and the one before, which a slow rank may still read
};

Agreement::Agreement(const DeviceMesh& mesh) : ranks_(static_cast<int>(mesh.size())) {
  const auto all = mesh.flatten("agreement").communicator();
  const bool first = all->rank() == 0;
  auto where = at::zeros({2}, at::kLong); // the first rank's process and its descriptor
  if (first) {
    const int file = memfd_create("agreement", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, sizeof(Board)) == 0, "no shared memory for the ranks' agreement");
    where[0] = static_cast<int64_t>(getpid());
    where[1] = file;
  }
  where = where.to(mesh.device());
  all->broadcast(where, 0, "agreement").wait();
  where = where.cpu();
  const auto path = fmt::format("/proc/{}/fd/{}", where[0].item<int64_t>(), where[1].item<int64_t>());
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  void* memory = file < 0 ? MAP_FAILED : mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  TORCH_CHECK(memory != MAP_FAILED, "cannot map ", path);
  close(file);
  all->barrier("agreement");
  if (first) close(where[1].item<int>());
  board_ = std::shared_ptr<Board>(static_cast<Board*>(memory), [](Board* board) { munmap(board, sizeof(Board)); });
}

bool Agreement::everyone(bool fine) const {
  const auto round = board_->round.load();
  auto& verdict = board_->verdicts[round % 2];
  if (!fine) ++board_->refused;
  if (++board_->arrived == ranks_) {
    verdict = board_->refused.exchange(0) == 0;
    board_->arrived = 0;
    board_->round = round + 1;
    return verdict;
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (board_->round == round) {
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "the other ranks do not come");
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return verdict;
}

} // namespace tessera::testing
