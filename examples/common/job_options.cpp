#include "common/job_options.h"

#include <absl/flags/flag.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include <functional>
#include <numeric>

#include "common/command_line.h"

ABSL_FLAG(int32_t, ranks, 0, "local ranks to start; 0: the environment (torchrun, Slurm, mpirun) says what rank this process is");
ABSL_FLAG(
    std::string, dims, "",
    "names of the dims of --mesh, such as dp,cp,tp; a last one called tp splits layers, one before it called ep experts, one "
    "before these called cp sequences, and a first one called pp is for a pipeline");
ABSL_FLAG(std::string, mesh, "",
          "shape of the device mesh, such as 4 or 2x2; default: one dim, for hybrid and hierarchical 2 x half of the ranks");
ABSL_FLAG(std::string, device, "cpu", "cpu or cuda");
ABSL_FLAG(int32_t, threads, 0, "threads a rank; 0: OMP_NUM_THREADS, or else the cores divided by the local ranks");
ABSL_FLAG(
    std::string, strategy, "full",
    "no-shard, zero-1, zero-2, full, hybrid (replicate x shard), hierarchical (between nodes x inside a node), or none (one "
    "process, nothing of Tessera's)");
ABSL_FLAG(std::string, layout, "ragged", "of the parameters in a group's buffers: ragged or per-parameter");
ABSL_FLAG(std::string, precision, "fp32", "of forward and backward: fp32, bf16 or fp16 (the sharded parameters stay fp32)");
ABSL_FLAG(std::string, reduce_precision, "fp32", "of the gradient reduction under --precision bf16 or fp16: fp32, bf16 or fp16");
ABSL_FLAG(std::string, reshard_after_forward, "auto",
          "free a block's parameters between forward and backward: true, false, or auto");
ABSL_FLAG(std::string, quantize, "",
          "gathers and reductions in fewer bits, such as gather=int8,reduction=int4,error_feedback or reduction=power-sgd,rank=2 "
          "(docs/communication.md); default: none");

namespace examples {
namespace {

Choices<std::optional<Strategy>> strategies() {
  Choices<std::optional<Strategy>> choices;
  for (const auto& row : tessera::kStrategies) choices.emplace_back(row.name.data(), row.strategy);
  choices.emplace_back("none", std::nullopt);
  return choices;
}
const Choices<std::optional<Strategy>> kStrategies = strategies();

/// Whether the mesh has two dims.
bool takes_groups(const JobOptions& options) { return options.strategy && tessera::row_of(*options.strategy).outer; }

const Choices<Precision> kPrecisions{{"fp32", Precision::kFp32}, {"bf16", Precision::kBf16}, {"fp16", Precision::kFp16}};
const Choices<tessera::BufferLayout> kLayouts{{"ragged", tessera::BufferLayout::kRagged},
                                              {"per-parameter", tessera::BufferLayout::kPerParameter}};
const Choices<c10::DeviceType> kDevices{{"cpu", c10::kCPU}, {"cuda", c10::kCUDA}};
const Choices<std::optional<bool>> kReshard{{"auto", std::nullopt}, {"true", true}, {"false", false}};

constexpr int kMostThreads = 1024; // OpenMP would start them all

void check(const JobOptions& options) {
  check_at_least("ranks", options.ranks, 0);
  check_at_least("threads", options.threads, 0);
  TORCH_CHECK(options.threads <= kMostThreads, "--threads is ", options.threads, ", but must be at most ", kMostThreads);
  TORCH_CHECK(options.strategy || options.precision == Precision::kFp32, "--precision ", to_string(options.precision),
              " needs sharding (the masters stay fp32): use --strategy no-shard, also on one rank, in place of none");
  TORCH_CHECK(options.strategy || options.mesh.empty(), "--mesh has no meaning under --strategy none");
  TORCH_CHECK(!takes_groups(options) || options.mesh.empty() || options.mesh.size() == 2, "--strategy ",
              to_string(options.strategy), " needs a mesh of two dims (between groups x inside a group), but --mesh has ",
              options.mesh.size());
  TORCH_CHECK(takes_groups(options) || options.mesh.size() <= 1, "--strategy ", to_string(options.strategy),
              " needs a mesh of one dim, but --mesh has ", options.mesh.size());
  TORCH_CHECK(options.device == c10::kCPU || options.strategy, "--strategy none runs on the CPU only");
}

/// Takes a first dim named pp and last ones named cp and tp off the mesh: the model, sequences and layers are split over them.
void take_other_dims(bool splits_models, JobOptions& options) {
  const auto text = absl::GetFlag(FLAGS_dims);
  if (text.empty()) return;
  std::vector<std::string> names = absl::StrSplit(text, ',');
  TORCH_CHECK(names.size() == options.mesh.size(), "--dims ", text, " names ", names.size(), " dims, but --mesh has ",
              options.mesh.size());
  if (names.front() == "pp") {
    TORCH_CHECK(splits_models, "--dims ", text, ": this program has no pipelines");
    options.pipeline = options.mesh.front();
    names.erase(names.begin());
    options.mesh.erase(options.mesh.begin());
  }
  const auto take = [&](const char* name) -> std::optional<int64_t> {
    if (names.empty() || names.back() != name) return std::nullopt;
    TORCH_CHECK(splits_models, "--dims ", text, ": this program has no dim ", name);
    const auto ranks = options.mesh.back();
    names.pop_back();
    options.mesh.pop_back();
    return ranks;
  };
  options.tensor_parallel = take("tp");
  options.expert_parallel = take("ep");
  options.context_parallel = take("cp");
  for (const auto& name : names) {
    TORCH_CHECK(name != "tp", "--dims ", text, ": tp must be the last dim");
    TORCH_CHECK(name != "ep", "--dims ", text, ": ep must be the last dim, or before tp");
    TORCH_CHECK(name != "cp", "--dims ", text, ": cp must be the last dim, or before ep and tp");
    TORCH_CHECK(name != "pp", "--dims ", text, ": pp must be the first dim");
  }
  if (!options.context_parallel && !options.expert_parallel) return;
  if (options.mesh.empty()) options.mesh.push_back(1);
  options.mesh.back() *= options.context_parallel.value_or(1) * options.expert_parallel.value_or(1);
}

/// The mesh without pp and tp, of `world` ranks.
MeshShape data_parallel_shape(const JobOptions& options, int world) {
  const bool groups = takes_groups(options);
  auto shape = options.mesh;
  if (shape.empty()) {
    TORCH_CHECK(!groups || world % 2 == 0, "--strategy ", to_string(options.strategy), " on ", world,
                " ranks needs --mesh: its default has 2 groups");
    shape = groups ? std::vector<int64_t>{2, world / 2} : std::vector<int64_t>{world};
  }
  if (groups) return {shape, {options.strategy == Strategy::kHybridShard ? "replicate" : "outer", "shard"}};
  return {shape, {options.strategy == Strategy::kNoShard ? "replicate" : "shard"}};
}

} // namespace

JobOptions job_options(bool splits_models) {
  JobOptions options;
  options.ranks = absl::GetFlag(FLAGS_ranks);
  if (!absl::GetFlag(FLAGS_mesh).empty()) options.mesh = parse_mesh(absl::GetFlag(FLAGS_mesh));
  take_other_dims(splits_models, options);
  options.device = choose("device", absl::GetFlag(FLAGS_device), kDevices);
  options.threads = absl::GetFlag(FLAGS_threads);
  options.strategy = choose("strategy", absl::GetFlag(FLAGS_strategy), kStrategies);
  options.communication = tessera::communication_of(absl::GetFlag(FLAGS_quantize));
  TORCH_CHECK(options.strategy || absl::GetFlag(FLAGS_quantize).empty(), "--quantize has no meaning under --strategy none");
  options.layout = choose("layout", absl::GetFlag(FLAGS_layout), kLayouts);
  options.precision = choose("precision", absl::GetFlag(FLAGS_precision), kPrecisions);
  options.reduce_precision = choose("reduce-precision", absl::GetFlag(FLAGS_reduce_precision), kPrecisions);
  options.reshard_after_forward = choose("reshard-after-forward", absl::GetFlag(FLAGS_reshard_after_forward), kReshard);
  check(options);
  return options;
}

MeshShape mesh_shape(const JobOptions& options, int world) {
  auto mesh = data_parallel_shape(options, static_cast<int>(data_ranks(options, world)));
  if (options.pipeline) {
    mesh.shape.insert(mesh.shape.begin(), *options.pipeline);
    mesh.names.insert(mesh.names.begin(), "pp");
  }
  if (options.tensor_parallel) {
    mesh.shape.push_back(*options.tensor_parallel);
    mesh.names.emplace_back("tp");
  }
  const auto size = std::accumulate(mesh.shape.begin(), mesh.shape.end(), int64_t{1}, std::multiplies<>());
  TORCH_CHECK(size == world, "--mesh ", absl::StrJoin(mesh.shape, "x"), " holds ", size, " ranks, but there are ", world);
  return mesh;
}

void check_job(const JobOptions& options, int world) {
  TORCH_CHECK(options.strategy || world == 1, "--strategy none is for one process, but there are ", world, " ranks");
  if (options.strategy) mesh_shape(options, world);
}

std::vector<int64_t> parse_mesh(const std::string& text) {
  std::vector<int64_t> shape;
  for (const auto part : absl::StrSplit(text, 'x')) {
    int32_t size = 0;
    TORCH_CHECK(absl::SimpleAtoi(part, &size) && size > 0, "--mesh is '", text,
                "', but must be sizes joined by x, such as 4 or 2x2");
    shape.push_back(size);
  }
  return shape;
}

const char* to_string(const std::optional<Strategy>& strategy) { return name_of(strategy, kStrategies); }
const char* to_string(Precision precision) { return name_of(precision, kPrecisions); }
const char* to_string(tessera::BufferLayout layout) { return name_of(layout, kLayouts); }

} // namespace examples
