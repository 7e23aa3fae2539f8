// State dicts in memory, and checkpoints in a folder.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/hugging_face.h>
#include <tessera/checkpoint/torch_file.h>
#include <tessera/fsdp/meta_init.h>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/actions/saved_state.h>
#include <tessera/tests/fsdp/scripts/random_sharding.h>

namespace tessera::testing::scripts {
namespace {

/// Of a snapshot, and of its load. On the unsharded side every process is a first rank.
struct SnapshotOptions {
  SnapshotOptions(Draw& draw, bool is_sharded) {
    taken.full_state_dict = draw.chance(60);
    taken.cpu_offload = !taken.full_state_dict || draw.chance(30);
    taken.flatten_optimizer_state_dict = draw.chance(30);
    taken.ignore_frozen_params = loaded.ignore_frozen_params = draw.chance(15);
    loaded.strict = !taken.ignore_frozen_params; // others may be frozen then
    const bool of_first_rank = taken.full_state_dict && draw.chance(25);
    taken.rank0_only = loaded.broadcast_from_rank0 = of_first_rank && is_sharded;
  }

  StateDictOptions taken, loaded;
};

void take_snapshot(Turn& turn) {
  const SnapshotOptions options(turn.draw, turn.side.sharded);
  const bool has_optimizer = turn.draw.chance(60);
  const std::string name = turn.draw.chance(20) ? "named" : "";
  auto& trainee = turn.trainee;
  const auto take = [&] {
    if (!has_optimizer) return state_dict(*trainee.model, options.taken);
    if (!name.empty()) return state_dict(*trainee.model, {{name, *trainee.optimizer}}, options.taken);
    return state_dict(*trainee.model, *trainee.optimizer, options.taken);
  };
  trainee.snapshots.push_back({take(), has_optimizer, name, options.loaded});
}

void restore_snapshot(Turn& turn) {
  auto& trainee = turn.trainee;
  if (trainee.snapshots.empty()) return;
  const auto& snapshot = turn.draw.of(trainee.snapshots);
  if (snapshot.has_optimizer && !snapshot.optimizer_name.empty()) {
    load_state_dict(*trainee.model, {{snapshot.optimizer_name, *trainee.optimizer}}, snapshot.state, snapshot.options);
  } else if (snapshot.has_optimizer) {
    load_state_dict(*trainee.model, *trainee.optimizer, snapshot.state, snapshot.options);
  } else {
    load_state_dict(*trainee.model, snapshot.state, snapshot.options);
  }
}

/// A new process: another model object of the same shapes, sharded in another way.
void start_anew(Trainee& trainee, uint64_t sharding, bool on_meta) {
  const auto frozen = trainee.model->parameters();
  auto model = on_meta ? tessera::on_meta(trainee.build) : trainee.build();
  const auto parameters = model->parameters();
  for (size_t i = 0; i < frozen.size(); ++i) parameters[i].requires_grad_(frozen[i].requires_grad());
  const auto before = trainee.model->modules(), modules = model->modules();
  for (size_t i = 0; i < modules.size(); ++i) modules[i]->train(before[i]->is_training()); // from the outer to the inner
  trainee.take(shard_at_random(*model, sharding, !trainee.writes_views && !trainee.policy, trainee.policy));
  if (on_meta) {
    materialize(*model, clear);
  } else {
    model->apply([](torch::nn::Module& module) { clear(module); });
  }
  trainee.model = model;
  trainee.schedule.reset();
  trainee.optimizer = trainee.plan.make(*model);
  if (trainee.make_schedule) trainee.schedule = trainee.make_schedule(*trainee.optimizer);
  if (trainee.average) trainee.average = trainee.make_average(*model);
}

/// The unsharded side goes on with what it has. Files cannot hold complex numbers.
void save_and_load(Turn& turn) {
  auto& trainee = turn.trainee;
  if (has_complex_parameters(*trainee.model)) return;
  const bool anew = turn.draw.chance(60), on_meta = turn.draw.chance(30);
  const auto sharding = turn.draw.seed();
  trainee.forget_state();
  if (trainee.schedule) trainee.schedule->set_steps_taken(trainee.schedule->steps_taken()); // a load sets the lr as well
  if (!turn.side.sharded) return;
  const auto folder = turn.side.folder / std::to_string(turn.draw.seed());
  checkpoint::SaveOptions options;
  options.overwrite = true;
  options.update_latest = false;
  checkpoint::save(state_of(trainee), folder, options);
  if (anew) {
    start_anew(trainee, sharding, on_meta);
  } else {
    trainee.model->apply([](torch::nn::Module& module) { clear(module); });
  }
  checkpoint::load(state_of(trainee), folder);
}

/// An unsharded model as a file holds it that all ranks wrote.
std::shared_ptr<RandomModel> exported(Turn& turn, const std::filesystem::path& path) {
  auto model = turn.trainee.build();
  if (turn.draw.chance(50)) {
    checkpoint::save_hugging_face(state_dict(*turn.trainee.model), path, {.overwrite = true});
    checkpoint::load(state_dict(*model), path);
  } else {
    checkpoint::save_torch(state_dict(*turn.trainee.model), path.string() + ".pt", {.overwrite = true});
    torch::load(model, path.string() + ".pt");
  }
  return model;
}

void export_weights(Turn& turn) {
  if (has_complex_parameters(*turn.trainee.model)) return;
  const auto path = turn.side.folder / ("export-" + std::to_string(turn.draw.seed()));
  const auto model = turn.side.sharded ? exported(turn, path) : turn.trainee.model;
  for (const auto& tensors : {model->parameters(), model->buffers()}) {
    for (const auto& tensor : tensors) {
      if (tensor.scalar_type() != torch::kBFloat16) turn.side.record(tensor); // too coarse to compare
    }
  }
}

} // namespace

std::vector<Action> state_actions() {
  return {{"take a snapshot", 5, When::kAnywhere, take_snapshot},
          {"restore a snapshot", 5, When::kAnywhere, restore_snapshot},
          {"save and load", 3, When::kReduced, save_and_load},
          {"export", 3, When::kAnywhere, export_weights}};
}

} // namespace tessera::testing::scripts
