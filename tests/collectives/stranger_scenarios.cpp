// Scenarios of rank_program in which others than ranks connect to its ports.
#include "rank_scenarios.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>

namespace tessera::testing {

namespace {

constexpr int kStrangers = 500;      // of each kind and process
constexpr int kVisitsOfTheStore = 8; // for each look at the ports of the process, which takes longer

/// The ports at which this process listens now, on IPv4 or at all addresses.
std::set<uint16_t> own_ports() {
  std::set<std::string> own;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;
    const auto target = std::filesystem::read_symlink(file.path(), closed).string();
    if (target.starts_with("socket:[")) own.insert(target.substr(8, target.size() - 9));
  }
  std::set<uint16_t> ports;
  for (const auto* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    while (std::getline(file, line)) {
      std::istringstream words(line);
      std::string slot, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      words >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> user >> timeout >> inode;
      if (state != "0A" || !own.contains(inode)) continue; // 0A: it listens
      ports.insert(static_cast<uint16_t>(std::stoi(local.substr(local.find(':') + 1), nullptr, 16)));
    }
  }
  return ports;
}

/// A connection, or -1 where nobody listens any more.
int connect_to(uint16_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return descriptor;
  close(descriptor);
  return -1;
}

/// Half of the connections say something that means nothing and go away, or wait for an answer. The others say nothing.
class Strangers {
 public:
  explicit Strangers(uint32_t seed) : random_(seed) {}
  ~Strangers() {
    for (const int descriptor : open_) close(descriptor);
  }
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;

  void visit(uint16_t port) {
    const int descriptor = connect_to(port);
    if (descriptor < 0) return;
    ++visits_;
    std::string bytes(random_() % 300, '\0');
    for (auto& byte : bytes) byte = static_cast<char>(random_());
    if (visits_ % 2 == 0) static_cast<void>(send(descriptor, bytes.data(), bytes.size(), MSG_NOSIGNAL));
    if (visits_ % 4 == 0) {
      close(descriptor);
      return;
    }
    open_.push_back(descriptor);
    if (open_.size() <= 100) return; // no more descriptors than a job has
    close(open_.front());
    open_.erase(open_.begin());
  }
  int visits() const { return visits_; }

 private:
  std::mt19937 random_;
  std::vector<int> open_;
  int visits_ = 0;
};

} // namespace

void strangers_on_every_port() {
  World world;
  std::atomic<bool> ends{false};
  std::atomic<int> visits{0};
  std::thread others([&] {
    Strangers strangers(static_cast<uint32_t>(world.rank()) + 1);
    const auto store_port = static_cast<uint16_t>(std::stoi(std::getenv("MASTER_PORT")));
    while (!ends || strangers.visits() < 2 * kStrangers) {
      for (int i = 0; i < kVisitsOfTheStore; ++i) strangers.visit(store_port);
      for (const auto port : own_ports()) strangers.visit(port);
      visits = strangers.visits();
    }
  });
  for (int group = 0; group < 8; ++group) { // ports are open while a group is made
    const auto communicator = world.context.communicator(ranks_up_to(world.last() + 1), at::kCPU, c10::str("group ", group));
    for (int call = 0; call < 20; ++call) {
      auto tensor = at::full({1000}, world.rank() + 1);
      communicator->all_reduce(tensor, ReduceOp::kSum, "sum").wait();
      const auto ranks = world.last() + 1;
      TORCH_CHECK(tensor.eq(ranks * (ranks + 1) / 2).all().item<bool>(), "a wrong sum");
    }
  }
  ends = true;
  others.join();
  world.group->barrier("all have met their strangers");
  std::printf("rank %d met %d strangers\n", world.rank(), visits.load());
}

} // namespace tessera::testing
