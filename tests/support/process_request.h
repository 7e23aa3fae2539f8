#pragma once

#include <sys/resource.h>
#include <sys/types.h>
#include <array>
#include <csignal>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

/// What a process hands to a program that it starts: all that `posix_spawn` would, for one that a zygote forks instead.
struct ProcessRequest {
  std::vector<std::string> arguments;
  std::vector<std::string> variables; ///< "NAME=value"
  std::string folder;                 ///< the working directory
  std::map<int, int> descriptors; ///< its number in the program, and that of the sender, or of the receiver once it is received
  std::array<rlimit, RLIM_NLIMITS> limits = {};
  sigset_t blocked = {};   ///< signals
  uint64_t ignored = 0;    ///< signals, a bit each
  bool is_session = false; ///< it leads a session and a group of processes of its own
  bool is_group = false;   ///< it leads a group of processes in its session
};

/// With the working directory, the limits, the signals and the descriptors of this process that are not marked close-on-exec.
ProcessRequest request_of_this_process();

/// Over a connection of SOCK_SEQPACKET. Throws an error where it is lost, or the request is larger than a message may be.
void send_request(int connection, const ProcessRequest& request);

/// False at the end of the connection.
bool receive_request(int connection, ProcessRequest& request);

/// Makes this process, a fork of another one, what the request says. Its descriptors are those of the request alone. The signals
/// stay as they are until `take_signals`.
void become(const ProcessRequest& request);
void take_signals(const ProcessRequest& request);

} // namespace tessera::testing
