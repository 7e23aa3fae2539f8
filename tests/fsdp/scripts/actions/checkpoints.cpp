// Checkpoints elsewhere than in a folder, by some of the ranks, of which a part is read, and that the program does not know.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/read_state_dict.h>
#include <tessera/collectives/process_context.h>

#include <set>

#include <tessera/tests/checkpoint/shared_memory_storage.h>
#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/actions/saved_state.h>

namespace tessera::testing::scripts {
namespace {

/// Both sides write the same values to their weights: the sharded one by a load.
void rewrite(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& tensor : module.parameters()) tensor.copy_(tensor.clone());
  for (auto& tensor : module.buffers()) tensor.copy_(tensor.clone());
}

std::filesystem::path new_folder(Turn& turn) { return turn.side.folder / ("c-" + std::to_string(turn.draw.seed())); }

void save_to_storage(Turn& turn) {
  auto& model = *turn.trainee.model;
  if (has_complex_parameters(model)) return;
  const auto folder = new_folder(turn);
  if (!turn.side.sharded) return rewrite(model);
  std::filesystem::create_directory(folder);
  SharedMemoryStorage storage(folder);
  checkpoint::save(state_of(turn.trainee), storage, "c");
  model.apply(clear);
  checkpoint::load(state_of(turn.trainee), storage, "c");
}

/// The whole state, gathered, is saved by some of the ranks and loaded by all.
void save_by_some_ranks(Turn& turn) {
  auto& model = *turn.trainee.model;
  if (has_complex_parameters(model)) return;
  const auto folder = new_folder(turn);
  const auto drawn = turn.draw.below(1 << 4);
  if (!turn.side.sharded) return rewrite(model);
  std::vector<int64_t> ranks;
  for (int64_t rank = 0; rank < process_context().world_size(); ++rank) {
    if ((drawn >> rank) % 2 == 1) ranks.push_back(rank);
  }
  if (ranks.empty()) ranks.push_back(process_context().world_size() - 1);
  const auto mesh = make_device_mesh(at::kCPU, {static_cast<int64_t>(ranks.size())}, ranks);
  const auto state = state_dict(model, *turn.trainee.optimizer, {.full_state_dict = true});
  if (mesh.coordinate()) checkpoint::save(state, folder, {.update_latest = false, .mesh = mesh});
  // A load votes after all ranks have come, and those that saved come when it is written.
  model.apply(clear);
  process_context()
      .communicator(init_device_mesh(at::kCPU, {process_context().world_size()}).ranks(), at::kCPU)
      ->barrier("saved");
  checkpoint::load(state_dict(model, *turn.trainee.optimizer), folder);
}

/// New tensors of other layouts take the place of the state.
void read_unknown(Turn& turn) {
  auto& model = *turn.trainee.model;
  if (has_complex_parameters(model)) return;
  const auto folder = new_folder(turn);
  const bool on_mesh = turn.draw.chance(60), replicated = turn.draw.chance(30), has_optimizer = turn.draw.chance(50);
  if (!turn.side.sharded) return rewrite(model);
  auto& optimizer = *turn.trainee.optimizer;
  checkpoint::save(has_optimizer ? state_dict(model, optimizer) : state_dict(model), folder, {.update_latest = false});
  checkpoint::ReadOptions options;
  if (on_mesh) options.mesh = init_device_mesh(test_device_type(), {process_context().world_size()});
  if (on_mesh && replicated) options.placements = {Replicate{}};
  const auto read = checkpoint::read_state_dict(folder, options);
  model.apply(clear);
  if (has_optimizer) {
    load_state_dict(model, optimizer, read);
  } else {
    load_state_dict(model, read);
  }
}

/// Some of the parameters go back to what was saved, and the others stay.
void load_a_part(Turn& turn) {
  auto& model = *turn.trainee.model;
  if (has_complex_parameters(model)) return;
  const auto folder = new_folder(turn);
  std::set<const void*> chosen; // by tensor: a tied one has several names
  std::set<std::string> names;
  const auto parameters = model.named_parameters();
  for (const auto& item : parameters) {
    if (turn.draw.chance(50)) chosen.insert(item.value().unsafeGetTensorImpl());
  }
  for (const auto& item : parameters) {
    if (chosen.count(item.value().unsafeGetTensorImpl())) names.insert(item.key());
  }
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> kept;
  if (!turn.side.sharded) {
    for (const auto& name : names) kept.push_back(parameters[name].clone());
  } else {
    checkpoint::save(state_of(turn.trainee), folder, {.update_latest = false});
  }
  std::set<const void*> changed;
  for (auto& parameter : model.parameters()) {
    if (changed.insert(parameter.unsafeGetTensorImpl()).second) parameter.mul_(0.5);
  }
  if (!turn.side.sharded) {
    for (const auto& name : names)
      parameters[name].copy_(kept[static_cast<size_t>(std::distance(names.begin(), names.find(name)))]);
  } else {
    checkpoint::load(state_of(turn.trainee), folder, {.filter = [&](const std::string& name) { return names.count(name) > 0; }});
  }
}

} // namespace

std::vector<Action> checkpoint_actions() {
  return {{"save to a storage", 1, When::kBetweenSteps, save_to_storage},
          {"save by some ranks", 1, When::kBetweenSteps, save_by_some_ranks},
          {"read a checkpoint", 1, When::kBetweenSteps, read_unknown},
          {"load a part", 2, When::kBetweenSteps, load_a_part}};
}

} // namespace tessera::testing::scripts
