// Trains with a Trainer, and gets signals at a moment that its arguments name:
//   trainer_program --ranks N folder=F strategy=NAME steps=N [save=N] [evaluate=N] [micro=N]
//   [signal=term|group|usr2|kill|twice|throw]
//                   [tick=N] [who=all|launcher|RANK]
// A rank ticks where it reads a micro-batch, computes a loss, and makes a state to save. Rank 0 prints "loss STEP VALUE",
// "saved STEP" and "end REASON STEPS".
#include <fmt/format.h>
#include <tessera/base/error_text.h>
#include <tessera/data/order/mesh_position.h>
#include <tessera/tessera.h>
#include <tessera/tests/training/loop/token_training.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <map>

namespace {

using namespace tessera;          // NOLINT(google-build-using-namespace): a program of its own
using namespace tessera::testing; // NOLINT(google-build-using-namespace)
using tessera::internal::position_in;

using Arguments = std::map<std::string, std::string>;

Arguments parse(int argc, char** argv) {
  Arguments arguments{{"save", "0"}, {"evaluate", "0"}, {"micro", "2"}, {"signal", ""}, {"tick", "0"}, {"who", "all"}};
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const auto equals = text.find('=');
    if (equals != std::string::npos) arguments[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return arguments;
}

int rank() { return process_context().rank(); }
int ranks() { return process_context().world_size(); }

/// Sends this process, or the one that started it, the signal of the arguments.
class Moment {
 public:
  explicit Moment(const Arguments& arguments)
      : signal_(arguments.at("signal")), who_(arguments.at("who")), left_(std::stoll(arguments.at("tick"))) {}

  void tick() {
    if (left_ == 0 || --left_ > 0) return;
    const bool is_launcher = who_ == "launcher";
    if (is_launcher ? rank() != 0 : who_ != "all" && std::stoi(who_) != rank()) return;
    TORCH_CHECK(signal_ != "throw", "thrown at its moment");
    const auto target = is_launcher ? getppid() : getpid();
    if (signal_ == "usr2") kill(target, SIGUSR2);
    if (signal_ == "kill") kill(target, SIGKILL);
    if (signal_ == "term" || signal_ == "twice") kill(target, SIGTERM);
    if (signal_ == "twice") kill(target, SIGTERM);
    if (signal_ == "group") kill(0, SIGTERM); // the ranks, and who started them, who passes it on
  }

 private:
  std::string signal_, who_;
  int64_t left_;
};

/// A source that ticks.
struct TickingSource {
  TokenSource source;
  Moment* moment;
  std::optional<Tokens> next() {
    moment->tick();
    return source.next();
  }
  DataPosition position() const { return source.position(); }
  void seek(const DataPosition& position) { source.seek(position); }
};

/// Ranks, and those that have different data.
struct Meshes {
  DeviceMesh all, data;
};

Meshes make_meshes(const std::string& strategy) {
  const auto pairs = ranks() % 2 == 0 ? 2 : 1;
  if (strategy == "hybrid") {
    const auto mesh = init_device_mesh(at::kCPU, {pairs, ranks() / pairs}, {"replicate", "shard"});
    return {mesh, mesh};
  }
  if (strategy == "tensor") {
    const auto mesh = init_device_mesh(at::kCPU, {ranks() / pairs, pairs}, {"dp", "tp"});
    return {mesh, mesh["dp"]};
  }
  const auto mesh = init_device_mesh(at::kCPU, {ranks()}, {"shard"});
  return {mesh, mesh};
}

void shard(Net& net, const std::string& strategy, const Meshes& meshes) {
  FullyShardOptions options;
  if (strategy == "per-parameter") options.layout = BufferLayout::kPerParameter;
  if (strategy == "zero2") options.strategy = Strategy::kZero2;
  if (strategy == "tensor") {
    parallelize(*net, meshes.all["tp"], {{"blocks.*.up", Colwise{}}, {"blocks.*.down", Rowwise{}}});
  }
  const auto wrap = [&](torch::nn::Module& module) {
    strategy == "replicate" ? replicate(module, meshes.data, options) : fully_shard(module, meshes.data, options);
  };
  for (auto& block : *net->blocks) wrap(*block);
  wrap(*net);
}

const char* name_of(StopReason reason) {
  switch (reason) {
    case StopReason::kSteps: return "steps";
    case StopReason::kEpochs: return "epochs";
    case StopReason::kRunTime: return "time";
    case StopReason::kTerminated: return "terminated";
    case StopReason::kAsked: return "asked";
    case StopReason::kEarlyStop: return "early";
  }
  return "";
}

void print(const std::string& line) {
  if (rank() != 0) return;
  std::printf("%s\n", line.c_str());
  std::fflush(stdout); // before a signal ends the process
}

TrainerOptions options_of(const Arguments& arguments, const Meshes& meshes) {
  const auto number = [&](const char* name) { return std::stoll(arguments.at(name)); };
  return {.mesh = meshes.all,
          .data_mesh = meshes.data,
          .micro_batches = number("micro"),
          .max_grad_norm = 0.5,
          .stop_after = {.steps = number("steps")},
          .save = {.folder = arguments.at("folder"),
                   .every = {.steps = number("save")},
                   .keep = 2,
                   .best = number("evaluate") > 0 ? "valid" : ""},
          .evaluate = {.steps = number("evaluate")},
          .log = {.jsonl = arguments.at("folder") + ".jsonl", .progress = false}};
}

void add_events(Trainer<Tokens>& trainer) {
  trainer.on_step([](const StepEvent& event, Control&) { print(fmt::format("loss {} {:.17g}", event.step, event.loss)); });
  trainer.on_save(
      [](const SaveEvent& event, Control&) { print(fmt::format("{} {}", event.is_best ? "best" : "saved", event.step)); });
  trainer.on_evaluate(
      [](const EvaluationEvent& event, Control&) { print(fmt::format("valid {} {:.17g}", event.step, event.loss)); });
}

void train(const Arguments& arguments) {
  init_process_group();
  {
    Moment moment(arguments);
    auto net = double_net();
    const auto meshes = make_meshes(arguments.at("strategy"));
    const auto data_ranks = meshes.data.size(), data_rank = position_in(meshes.data, "trainer_program");
    shard(net, arguments.at("strategy"), meshes);
    torch::optim::AdamW optimizer(net->parameters(), 1e-2);
    WarmupCosineLR schedule(optimizer, {.warmup_steps = 2, .total_steps = 40, .start_ratio = 0.1});
    Trainer<Tokens> trainer(*net, optimizer, options_of(arguments, meshes));
    trainer.loss([&](const Tokens& batch) {
      moment.tick();
      return token_loss_sum(net, batch);
    });
    const auto together = 24 / std::stoll(arguments.at("micro")); // so that each step has 24 rows
    trainer.data(TickingSource{TokenSource(41, together, data_rank, data_ranks), &moment}).schedule(schedule);
    trainer.keep("ticks", [&] {
      moment.tick();
      return StateDict();
    });
    trainer.evaluate("valid", TokenSource(17, 8, data_rank, data_ranks));
    add_events(trainer);
    const auto end = trainer.run();
    print(fmt::format("end {} {}", name_of(end.reason), end.steps));
  }
  destroy_process_group();
}

} // namespace

int main(int argc, char** argv) {
  try {
    const auto arguments = parse(argc, argv);
    const auto ranks = ranks_from_args(argc, argv);
    TORCH_CHECK(ranks && arguments.count("folder") && arguments.count("strategy"), "usage: see trainer_program.cpp");
    return launch(*ranks, [&] { train(arguments); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", internal::error_text(error).c_str());
  }
  return 1;
}
