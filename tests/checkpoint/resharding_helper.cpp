// One side of resharding_test, a job of any size.
//   resharding_helper --ranks N ROOT save STRATEGY...        trains under each, saves, and keeps the whole tensors beside it
//   resharding_helper --ranks N ROOT load [FROM STRATEGY]... loads FROM into the strategy, and prints "same" where all is
//   identical
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/save/plan.h>
#include <tessera/collectives/launch.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "sharded_training.h"

namespace {

using tessera::StateDict;
using tessera::testing::Training;
using Whole = c10::Dict<std::string, at::Tensor>;

const tessera::StateDictOptions kFull{.full_state_dict = true};

StateDict whole_state(Training& training) { return tessera::state_dict(training.model, training.optimizer, kFull); }

// All values as one text: numbers are written with all their digits.
std::string values_of(const StateDict& state) {
  tessera::internal::StateValues values;
  for (const auto& entry : state.entries()) {
    if (!entry.is_tensor()) values.emplace_back(entry.name, std::get<tessera::StateValue>(entry.content));
  }
  std::sort(values.begin(), values.end());
  return tessera::internal::to_json(values).dump();
}

// PyTorch's own format, so that what is compared never passed through a checkpoint.
void write(const StateDict& state, const std::filesystem::path& path) {
  Whole tensors;
  for (const auto& entry : state.entries()) {
    if (entry.is_tensor()) tensors.insert(entry.name, std::get<at::Tensor>(entry.content));
  }
  const auto bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(tensors, values_of(state)));
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(), a.nbytes()) == 0);
}

// The name of what differs; empty when nothing does.
std::string difference(const StateDict& state, const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto expected = torch::jit::pickle_load(bytes).toTuple();
  const auto tensors = c10::impl::toTypedDict<std::string, at::Tensor>(expected->elements()[0].toGenericDict());
  size_t compared = 0;
  for (const auto& entry : state.entries()) {
    if (!entry.is_tensor()) continue;
    if (!tensors.contains(entry.name) || !same_bits(state.tensor(entry.name), tensors.at(entry.name))) return entry.name;
    ++compared;
  }
  if (compared != tensors.size()) return "the number of tensors";
  return values_of(state) == expected->elements()[1].toStringRef() ? "" : "a value";
}

void save(const std::filesystem::path& root, const std::vector<std::string>& strategies) {
  auto& context = tessera::process_context();
  for (const auto& strategy : strategies) {
    const auto name = c10::str(context.world_size(), "-", strategy);
    Training training(strategy, 1);
    for (int64_t step = 0; step < 2; ++step) training.step(step);
    tessera::checkpoint::save(training.state(), root / name);
    const auto whole = whole_state(training);
    if (context.rank() == 0) write(whole, root / (name + ".whole"));
  }
}

void load(const std::filesystem::path& root, const std::vector<std::string>& arguments) {
  for (size_t i = 0; i + 1 < arguments.size(); i += 2) {
    Training training(arguments[i + 1], 2);
    tessera::checkpoint::load(training.state(), root / arguments[i]);
    const auto differing = difference(whole_state(training), root / (arguments[i] + ".whole"));
    std::printf("%s %s %s\n", arguments[i].c_str(), arguments[i + 1].c_str(), differing.empty() ? "same" : differing.c_str());
  }
}

void run(const std::filesystem::path& root, const std::string& command, const std::vector<std::string>& arguments) {
  tessera::init_process_group();
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ); // the ranks share it, line by line
  command == "save" ? save(root, arguments) : load(root, arguments);
  tessera::destroy_process_group();
}

} // namespace

int main(int argc, char** argv) {
  try {
    const auto ranks = tessera::ranks_from_args(argc, argv);
    TORCH_CHECK(ranks && argc > 5, "usage: resharding_helper --ranks N ROOT save|load ARGUMENT...");
    return tessera::launch(*ranks, [&] { run(argv[3], argv[4], {argv + 5, argv + argc}); });
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  }
  return 1;
}
