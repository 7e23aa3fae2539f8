// One rank of a job that saves, exports and loads a gibibyte, driven by `benchmarks/compare` through standard input.
//   measure_checkpoint FOLDER MEBIBYTES_OF_ALL_RANKS
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <common/program.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpointer.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/torch_file.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/mesh/device_mesh.h>

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>

#include "serve.h"

namespace tessera::benchmarks {
namespace {

constexpr int64_t kRows = 4096, kColumns = 1024; // 16 MiB a tensor

// A line of /proc/self/status, in KiB.
int64_t status_of(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1));
  }
  TORCH_CHECK(false, "/proc/self/status has no ", key);
}

// How much more of the host's memory this process held while `work` ran than before, at most.
template <typename Work>
int64_t peak_bytes_of(const Work& work) {
  std::ofstream("/proc/self/clear_refs") << "5"; // the peak starts anew
  const auto before = status_of("VmRSS");
  work();
  return (status_of("VmHWM") - before) * 1024;
}

class CheckpointJob {
 public:
  CheckpointJob(std::filesystem::path folder, int64_t mebibytes) : folder_(std::move(folder)) {
    auto& context = process_context();
    const int64_t ranks = context.world_size(), tensors = mebibytes / 16;
    TORCH_CHECK(kRows % ranks == 0, ranks, " ranks do not divide ", kRows, " rows");
    const auto mesh = init_device_mesh(at::kCPU, {ranks});
    for (int64_t i = 0; i < tensors; ++i) {
      shards_.push_back(at::full({kRows / ranks, kColumns}, static_cast<double>(i), at::kFloat));
      copies_.push_back(at::full({kRows / ranks, kColumns}, 0.0, at::kFloat));
      state_.add("layer." + std::to_string(i) + ".weight", from_local(shards_.back(), mesh, {Shard{0}}));
    }
    std::vector<int64_t> world(static_cast<size_t>(ranks));
    std::iota(world.begin(), world.end(), 0);
    world_ = context.communicator(world, at::kCPU, "benchmark");
  }

  nlohmann::json save() {
    clear("saved");
    return seconds_of([&] { checkpoint::save(state_, folder_ / "saved", kOnlyFolder); });
  }
  nlohmann::json load(bool verify) {
    checkpoint::LoadOptions options;
    options.verify = verify;
    return seconds_of([&] { checkpoint::load(state_, folder_ / "saved", options); });
  }
  // The memory copy that a save in the background cannot do without.
  nlohmann::json copy() {
    return seconds_of([&] {
      for (size_t i = 0; i < shards_.size(); ++i)
        std::memcpy(copies_[i].mutable_data_ptr(), shards_[i].const_data_ptr(), shards_[i].nbytes());
    });
  }
  nlohmann::json export_torch() {
    clear("model.pt");
    return exported([&] { checkpoint::save_torch(state_, folder_ / "model.pt"); });
  }
  nlohmann::json export_hugging_face() {
    clear("exported");
    return exported([&] { checkpoint::save_hugging_face(state_, folder_ / "exported"); });
  }
  // The time that a save in the background holds up its caller.
  nlohmann::json stall() {
    clear("background");
    auto seconds = seconds_of([&] { checkpointer_.save(state_, folder_ / "background", kOnlyFolder); });
    checkpointer_.wait();
    return seconds;
  }

 private:
  static inline const checkpoint::SaveOptions kOnlyFolder{.overwrite = false, .update_latest = false};

  // Removes what an earlier turn wrote, and lets the disk come to rest.
  void clear(const char* name) {
    world_->barrier("before removal");
    if (process_context().rank() == 0) {
      std::filesystem::remove_all(folder_ / name);
      ::sync();
    }
  }

  template <typename Work>
  nlohmann::json exported(const Work& work) {
    nlohmann::json seconds;
    const auto peak = peak_bytes_of([&] { seconds = seconds_of(work); });
    return {{"seconds", std::move(seconds)}, {"peak_bytes", peak}};
  }

  template <typename Work>
  nlohmann::json seconds_of(const Work& work) {
    world_->barrier("start");
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  std::filesystem::path folder_;
  std::vector<at::Tensor> shards_, copies_;
  StateDict state_;
  CommunicatorPtr world_;
  checkpoint::Checkpointer checkpointer_;
};

int run(int argc, char** argv) {
  TORCH_CHECK(argc == 3, "usage: measure_checkpoint FOLDER MEBIBYTES_OF_ALL_RANKS");
  init_process_group();
  {
    CheckpointJob job(argv[1], std::stoll(argv[2]));
    serve({{"save", [&] { return job.save(); }},
           {"load", [&] { return job.load(true); }},
           {"load-unverified", [&] { return job.load(false); }},
           {"copy", [&] { return job.copy(); }},
           {"stall", [&] { return job.stall(); }},
           {"export-torch", [&] { return job.export_torch(); }},
           {"export-hugging-face", [&] { return job.export_hugging_face(); }}});
  }
  destroy_process_group();
  return 0;
}

} // namespace
} // namespace tessera::benchmarks

int main(int argc, char** argv) {
  return examples::run_program("measure_checkpoint", [&] { return tessera::benchmarks::run(argc, argv); });
}
