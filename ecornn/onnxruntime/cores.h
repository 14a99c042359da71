// How many cores this process may use.
#ifndef ECORNN_ORT_CORES_H_
#define ECORNN_ORT_CORES_H_

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <string>

namespace ort {

// Physical ones of the affinity mask, hyper-threads counted once, as ecornn/host_cpu.py counts them.
inline int Cores() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;  // more processors than the mask has room for
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::string siblings = std::to_string(cpu);
    std::ifstream("/sys/devices/system/cpu/cpu" + siblings + "/topology/thread_siblings_list") >> siblings;
    cores.insert(siblings);
  }
  return std::max(1, static_cast<int>(cores.size()));
}

}  // namespace ort

#endif  // ECORNN_ORT_CORES_H_
