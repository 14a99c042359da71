// The order of memory of emulated kernels, where a test asks for it (memory_order.cc); cuda_on_cpu.cc says what happens.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace order {
// For each thread, how many of its stores somebody knows of, and how many of them a proxy fence is behind.
struct Knowledge { std::vector<unsigned> stores, fenced; };
extern bool on;
void begin(unsigned threads);            // blocks that run side by side begin
void settle();                           // what the thread wrote last is in memory: notes it
void meet(unsigned first, unsigned end); // at a barrier of all these threads
void give(unsigned thread, Knowledge& to);    // a thread comes to a barrier,
void take(unsigned thread, const Knowledge& from);  // and knows what all have brought there
void fence();
void proxy_fence();
void proxy_fence_shared();
const void* seen(const void* from, unsigned size, bool async);  // what a copy that starts now finds
void copied(const void* to, unsigned size);                     // into shared memory, but by a bulk copy
void overwritten(const void* to, unsigned size);                // and by one
bool unfenced(const void* from);         // whether wgmma finds no number there, in shared memory
}  // namespace order
